"""The same numbers each time, on a GPU too: there, some kernels add up in the order in which their threads come to it, the
backward pass of attention over packed rows among them. A processor always does the same.
"""

import os

import torch


def compute_alike_each_time() -> None:
    """For this process. A kernel that has no such form is named in the log, and used."""
    if not torch.cuda.is_available():
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it as it is first used
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Costs time, and nothing here reads what it did not write.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
