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

# On a GPU some kernels, the backward pass of attention among them, accumulate in the order in which their threads arrive,
# so results differ between runs unless PyTorch's deterministic mode is on. On a CPU results are always the same.

NONDETERMINISTIC_ERROR = re.compile(r"(\S+) does not have a deterministic implementation")
"""PyTorch's error in deterministic mode for an operation without a deterministic kernel."""
DETERMINISTIC_CUBLAS_WORKSPACES = (":4096:8", ":16:8")
"""Workspace settings with which cuBLAS is deterministic; PyTorch's deterministic mode rejects any other."""


def enable_determinism() -> None:
    """Turn on PyTorch's deterministic mode for this process; call before any computation.

    Operations use their deterministic kernel where one exists and raise an error where none does. `warn_only` is not an
    option: with it attention uses its faster nondeterministic kernel although it has a deterministic one.
    """
    if not torch.cuda.is_available():
        return
    if os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in DETERMINISTIC_CUBLAS_WORKSPACES:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = DETERMINISTIC_CUBLAS_WORKSPACES[0]  # cuBLAS reads it at its first use
    torch.use_deterministic_algorithms(True)
    # Filling costs time, and this program never reads memory that it has not written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def allow_nondeterminism() -> None:
    """Relax deterministic mode to warnings, after an operation without a deterministic kernel failed."""
    if torch.cuda.is_available():
        torch.use_deterministic_algorithms(True, warn_only=True)


def nondeterministic_operation(error: Exception) -> str | None:
    """Return the operation that raised `error` for lack of a deterministic kernel, else None."""
    found = NONDETERMINISTIC_ERROR.search(str(error)) if isinstance(error, RuntimeError) else None
    return found[1] if found else None


# The random states of this process, saved in checkpoints and captured before each step so that an aborted step can be
# repeated with the same random numbers.


@dataclass(frozen=True)
class RandomStates:
    """Random states of Python, NumPy and PyTorch in this process.

    A few KB, captured without a GPU synchronization.

    `gpu` is the state of the GPU that this process computes on; it draws nothing on others. transformers saves the states
    of all visible GPUs, which are wrong or missing when a run resumes on a machine with more or fewer GPUs.
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
        """Write the states under the key names that transformers uses."""
        write_state({"python": self.python, "numpy": self.numpy, "cpu": self.cpu, "cuda": self.gpu}, file)

    @classmethod
    def load(cls, file: Path) -> Self:
        found = read_state(file)
        gpu = found.get("cuda")
        if isinstance(gpu, list):  # the format of transformers' own checkpoints
            gpu = dict(enumerate(gpu)).get(torch.cuda.current_device()) if torch.cuda.is_available() else None
        return cls(found["python"], found["numpy"], found["cpu"], gpu)


def wrap_seed(seed: int) -> int:
    """Wrap a computed seed into NumPy's range of 32 bits."""
    return seed % 2**32
