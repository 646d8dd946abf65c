"""The random states of this process: those that a checkpoint holds, and as they were when nothing was drawn yet of what is
thrown away.
"""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from transformers.trainer_pt_utils import safe_globals


@dataclass(frozen=True)
class RandomStates:
    """A few KB, and no GPU is waited for.

    `gpu` is that of the GPU which the process computes on; of others it draws nothing. Where a run goes on, that may be
    another one of more or fewer: transformers' states of all that a process sees then were those of others, or none.
    """

    python: tuple[Any, ...]
    numpy: Any
    cpu: torch.Tensor
    gpu: torch.Tensor | None

    @classmethod
    def now(cls) -> Self:
        gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), gpu)

    def put_back(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.gpu is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(self.gpu)

    def save(self, file: Path) -> None:
        """By the names that transformers gives them."""
        torch.save({"python": self.python, "numpy": self.numpy, "cpu": self.cpu, "cuda": self.gpu}, file)

    @classmethod
    def load(cls, file: Path) -> Self:
        with safe_globals():
            found = torch.load(file, map_location="cpu", weights_only=True)
        gpu = found.get("cuda")
        if isinstance(gpu, list):  # as transformers saves them
            gpu = dict(enumerate(gpu)).get(torch.cuda.current_device()) if torch.cuda.is_available() else None
        return cls(found["python"], found["numpy"], found["cpu"], gpu)


def within_32_bits(seed: int) -> int:
    """The seed as NumPy takes it, of one that was added up."""
    return seed % 2**32
