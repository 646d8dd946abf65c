"""The validation loss as one number of a split: the same for every micro-batch and every number of processes. Pure.

A mean over micro-batches is not: a short last one, or one with few tokens to predict, would count as much as a full one.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import fsum
from typing import Any

EVALUATED = "eval_loss"
"""What the trainer's log has of a step after which the split was evaluated."""


@dataclass(frozen=True)
class Part:
    """What a micro-batch gave: means by name, over as much as `weight` says (tokens that are predicted, or rows)."""

    means: Mapping[str, float]
    weight: int


def share(rows: int, batch: int, rank: int, processes: int) -> list[range]:
    """The rows of each micro-batch of a process, none larger than `batch`; together the processes have each row once.

    All have equally many, for where weights are spread over them they must compute at the same time; a range is empty where
    there are fewer rows than micro-batches.
    """
    parts = processes * -(-rows // (batch * processes))
    return [range(part * rows // parts, (part + 1) * rows // parts) for part in range(rank, parts, processes)]


def together(parts: Iterable[Part]) -> dict[str, float]:
    """Each mean over all parts that weigh something and have it, whatever their order."""
    heavy = [part for part in parts if part.weight]
    return {name: mean(name, heavy) for name in dict.fromkeys(name for part in heavy for name in part.means)}


def mean(name: str, parts: Iterable[Part]) -> float:
    have = [part for part in parts if name in part.means]
    return fsum(part.means[name] * part.weight for part in have) / sum(part.weight for part in have)


def owed(step: int, every: int | None, last: int, history: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a run of that log still has to evaluate after `step`: it was asked to stop while it did.

    The trainer evaluates after the `last` step too, whether or not it is the turn of that one.
    """
    return bool(every and step and (step % every == 0 or step >= last)) and not any(
        entry["step"] == step for entry in history if EVALUATED in entry
    )
