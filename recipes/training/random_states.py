"""The random states of this process, as they were when nothing was drawn yet of what is thrown away."""

import random
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch


@dataclass(frozen=True)
class RandomStates:
    """Those that a checkpoint holds (transformers' `_save_rng_state`). A few KB, and no GPU is waited for."""

    python: tuple[Any, ...]
    numpy: Any
    cpu: torch.Tensor
    gpus: list[torch.Tensor]

    @classmethod
    def now(cls) -> Self:
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), torch.cuda.get_rng_state_all())

    def put_back(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        torch.cuda.set_rng_state_all(self.gpus)


def within_32_bits(seed: int) -> int:
    """The seed as NumPy takes it, of one that was added up."""
    return seed % 2**32
