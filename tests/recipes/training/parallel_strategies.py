"""Recipe settings of the parallel strategies under test."""

from typing import Any

CUT = ("tensor", "hybrid")
"""FSDP with tensor parallelism: a single pair of processes, or a pair for each process."""


def shape(strategy: str, processes: int) -> dict[str, Any]:
    if strategy in CUT:
        all_of_them = 2 * processes if strategy == "hybrid" else processes
        return {"strategy": "fsdp", "tensor_parallel": min(2, processes), "gpus_per_node": all_of_them, "backend": "gloo"}
    return {"strategy": strategy, "gpus_per_node": processes, "backend": "gloo"}


def rows_at_once(strategy: str) -> int:
    """Return the micro-batch size with which two processes use four rows per step."""
    return 4 if strategy in ("tensor", "pipeline") else 2
