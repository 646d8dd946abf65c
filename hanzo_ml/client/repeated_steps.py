"""Steps that a run does once more, and otherwise than the first time: after a divergence, or where it was sent back.

Their values are in the history of a metric twice, and the later ones are those of the weights that the run went on with.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

NEVER = 2**63 - 1
"""In the place of the time that an earlier release did not write down."""


@dataclass(frozen=True)
class Anew:
    """What was logged of `steps` up to `since`, in ms since 1970, is of the first time, and what came later is not."""

    steps: range
    since: int

    @classmethod
    def told(cls, steps: range, at: int | None) -> Self:
        """Of steps that were done once more from that time on, in ms since 1970; None where it was not written down."""
        return cls(steps, NEVER if at is None else at)


def first_until(anew: Iterable[Anew], step: int) -> int | None:
    """Up to when (ms since 1970) values of `step` are of a time before the newest; None where it is done once."""
    return max((each.since for each in anew if step in each.steps), default=None)
