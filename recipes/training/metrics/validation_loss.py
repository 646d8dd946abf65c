"""Average validation metrics of micro-batches, independently of their size and the process count."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import fsum
from typing import Any

EVAL_LOSS_KEY = "eval_loss"
"""Key in the trainer's log of a step that was evaluated."""


@dataclass(frozen=True)
class WeightedMeans:
    """Means of a micro-batch by name, weighted by its predicted tokens or rows."""

    means: Mapping[str, float]
    weight: int


def split_rows(rows: int, batch: int, rank: int, processes: int) -> list[range]:
    """Split rows into micro-batches of at most `batch` for this process.

    Together the processes cover each row once. All processes get the same number of micro-batches, because sharded weights
    need collectives; a range is empty if there are fewer rows than micro-batches.
    """
    parts = processes * -(-rows // (batch * processes))
    return [range(part * rows // parts, (part + 1) * rows // parts) for part in range(rank, parts, processes)]


def combine_means(parts: Iterable[WeightedMeans]) -> dict[str, float]:
    """Return each metric's weighted mean over the parts that have it, in any order."""
    weighted = [part for part in parts if part.weight]
    return {name: weighted_mean(name, weighted) for name in dict.fromkeys(name for part in weighted for name in part.means)}


def weighted_mean(name: str, parts: Iterable[WeightedMeans]) -> float:
    having = [part for part in parts if name in part.means]
    return fsum(part.means[name] * part.weight for part in having) / sum(part.weight for part in having)


def is_evaluation_due(step: int, every: int | None, last: int, history: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether the evaluation after `step` is missing: a stop request aborted it.

    The trainer also evaluates after the `last` step, whether or not it is a multiple of `every`.
    """
    return bool(every and step and (step % every == 0 or step >= last)) and not any(
        entry["step"] == step for entry in history if EVAL_LOSS_KEY in entry
    )
