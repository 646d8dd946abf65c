"""Make runs reproducible with deterministic kernels and saved random states."""

import os
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from recipes.training.checkpointing.state_files import read_state, write_state

# The same numbers each time, on a GPU too: there, some kernels add up in the order in which their threads come to it, the
# backward pass of attention among them, unless PyTorch is told to be strict. A processor always does the same.

NONDETERMINISTIC_ERROR = re.compile(r"(\S+) does not have a deterministic implementation")
"""How PyTorch says that it is strict, and an operation has no kernel that would do."""
DETERMINISTIC_CUBLAS_WORKSPACES = (":4096:8", ":16:8")
"""The workspaces with which cuBLAS computes the same each time; PyTorch refuses others where it is strict."""


def enable_determinism() -> None:
    """For this process, before it computes: what has a form that does, takes it, and what has none, is refused.

    With `warn_only`, attention would take the faster form that does not, although it has both.
    """
    if not torch.cuda.is_available():
        return
    if os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in DETERMINISTIC_CUBLAS_WORKSPACES:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = DETERMINISTIC_CUBLAS_WORKSPACES[0]  # cuBLAS reads it as it is first used
    torch.use_deterministic_algorithms(True)
    # Costs time, and nothing here reads what it did not write.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def allow_nondeterminism() -> None:
    """For this process, whose run came to an operation that was refused: a kernel may do otherwise each time."""
    if torch.cuda.is_available():
        torch.use_deterministic_algorithms(True, warn_only=True)


def nondeterministic_operation(error: Exception) -> str | None:
    """The operation that has no form which computes the same each time, if that is what went wrong."""
    found = NONDETERMINISTIC_ERROR.search(str(error)) if isinstance(error, RuntimeError) else None
    return found[1] if found else None


# The random states of this process: those that a checkpoint holds, and as they were when nothing was drawn yet of what is
# thrown away.


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
    def capture(cls) -> Self:
        gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), gpu)

    def restore(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.gpu is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(self.gpu)

    def save(self, file: Path) -> None:
        """By the names that transformers gives them."""
        write_state({"python": self.python, "numpy": self.numpy, "cpu": self.cpu, "cuda": self.gpu}, file)

    @classmethod
    def load(cls, file: Path) -> Self:
        found = read_state(file)
        gpu = found.get("cuda")
        if isinstance(gpu, list):  # as transformers saves them
            gpu = dict(enumerate(gpu)).get(torch.cuda.current_device()) if torch.cuda.is_available() else None
        return cls(found["python"], found["numpy"], found["cpu"], gpu)


def wrap_seed(seed: int) -> int:
    """The seed as NumPy takes it, of one that was added up."""
    return seed % 2**32
