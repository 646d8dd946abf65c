"""Random states as a checkpoint file stores them.

`test_gpu` covers the states of GPUs.
"""

import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipes.training.determinism import RandomStates, wrap_seed


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


@pytest.mark.requirement("I2")
def test_random_states_round_trip_through_a_file(tmp_path: Path) -> None:
    RandomStates.capture().save(tmp_path / "states.safetensors")
    expected = drawn()
    assert drawn() != expected
    RandomStates.load(tmp_path / "states.safetensors").restore()
    assert drawn() == expected


@pytest.mark.parametrize("of_gpus", [{}, {"cuda": torch.zeros(16, dtype=torch.uint8)}, {"cuda": []}], ids=str)
def test_random_states_of_older_checkpoints_are_read(of_gpus: dict[str, Any], tmp_path: Path) -> None:
    """As transformers writes them: without a GPU, with one process, and with several."""
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}
    torch.save(states | of_gpus, tmp_path / "states.pth")
    expected = drawn()
    if torch.cuda.is_available():
        pytest.skip("these are no states of this machine's GPUs")
    RandomStates.load(tmp_path / "states.pth").restore()
    assert drawn() == expected


class Harm:
    """Runs a command when unpickled."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.made,)


@pytest.mark.requirement("Z30")
def test_untrusted_random_state_pickle_is_refused(tmp_path: Path) -> None:
    torch.save({"python": Harm(tmp_path / "harm")}, tmp_path / "states.pth")
    with pytest.raises(pickle.UnpicklingError):
        RandomStates.load(tmp_path / "states.pth")
    assert not (tmp_path / "harm").exists()


def test_summed_seed_is_wrapped_to_numpy_range() -> None:
    """A seed within the range is unchanged."""
    assert [wrap_seed(seed) for seed in (0, 2**32 - 1, 2**32, 2**33 + 7)] == [0, 2**32 - 1, 0, 7]
    np.random.RandomState(wrap_seed(2**32 - 1))
