"""How the processes of a strategy share a model, as a recipe says it."""

from typing import Any

CUT = ("tensor", "hybrid")
"""Fsdp on processes of which each two hold a part of every weight: one such pair, or one in place of each process."""


def shape(strategy: str, processes: int) -> dict[str, Any]:
    if strategy in CUT:
        all_of_them = 2 * processes if strategy == "hybrid" else processes
        return {"strategy": "fsdp", "tensor_parallel": min(2, processes), "gpus_per_node": all_of_them, "backend": "gloo"}
    return {"strategy": strategy, "gpus_per_node": processes, "backend": "gloo"}


def rows_at_once(strategy: str) -> int:
    """In a micro-batch, so that two processes take four rows for a step."""
    return 4 if strategy in ("tensor", "pipeline") else 2
