"""Average validation loss and metrics of micro-batches independently of their size and process count."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import fsum
from typing import Any

EVAL_LOSS_KEY = "eval_loss"
"""What the trainer's log has of a step after which the split was evaluated."""


@dataclass(frozen=True)
class WeightedMeans:
    """What a micro-batch gave: means by name, over as much as `weight` says (tokens that are predicted, or rows)."""

    means: Mapping[str, float]
    weight: int


def split_rows(rows: int, batch: int, rank: int, processes: int) -> list[range]:
    """The rows of each micro-batch of a process, none larger than `batch`; together the processes have each row once.

    All have equally many, for where weights are spread over them they must compute at the same time; a range is empty where
    there are fewer rows than micro-batches.
    """
    parts = processes * -(-rows // (batch * processes))
    return [range(part * rows // parts, (part + 1) * rows // parts) for part in range(rank, parts, processes)]


def combine_means(parts: Iterable[WeightedMeans]) -> dict[str, float]:
    """Each mean over all parts that weigh something and have it, whatever their order."""
    weighted = [part for part in parts if part.weight]
    return {name: weighted_mean(name, weighted) for name in dict.fromkeys(name for part in weighted for name in part.means)}


def weighted_mean(name: str, parts: Iterable[WeightedMeans]) -> float:
    having = [part for part in parts if name in part.means]
    return fsum(part.means[name] * part.weight for part in having) / sum(part.weight for part in having)


def is_evaluation_due(step: int, every: int | None, last: int, history: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a run of that log still has to evaluate after `step`: it was asked to stop while it did.

    The trainer evaluates after the `last` step too, whether or not it is the turn of that one.
    """
    return bool(every and step and (step % every == 0 or step >= last)) and not any(
        entry["step"] == step for entry in history if EVAL_LOSS_KEY in entry
    )
