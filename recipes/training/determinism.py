"""The same numbers each time, on a GPU too: there, some kernels add up in the order in which their threads come to it, the
backward pass of attention among them, unless PyTorch is told to be strict. A processor always does the same.
"""

import os
import re

import torch

REFUSED = re.compile(r"(\S+) does not have a deterministic implementation")
"""How PyTorch says that it is strict, and an operation has no kernel that would do."""
CUBLAS_ALIKE = (":4096:8", ":16:8")
"""The workspaces with which cuBLAS computes the same each time; PyTorch refuses others where it is strict."""


def compute_alike_each_time() -> None:
    """For this process, before it computes: what has a form that does, takes it, and what has none, is refused.

    With `warn_only`, attention would take the faster form that does not, although it has both.
    """
    if not torch.cuda.is_available():
        return
    if os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in CUBLAS_ALIKE:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = CUBLAS_ALIKE[0]  # cuBLAS reads it as it is first used
    torch.use_deterministic_algorithms(True)
    # Costs time, and nothing here reads what it did not write.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def compute_with_what_there_is() -> None:
    """For this process, whose run came to an operation that was refused: a kernel may do otherwise each time."""
    if torch.cuda.is_available():
        torch.use_deterministic_algorithms(True, warn_only=True)


def refused_operation(error: Exception) -> str | None:
    """The operation that has no form which computes the same each time, if that is what went wrong."""
    found = REFUSED.search(str(error)) if isinstance(error, RuntimeError) else None
    return found[1] if found else None
