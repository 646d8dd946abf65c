"""Steps that a run computes again after a rewind or a divergence."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

UNKNOWN_TIME = 2**63 - 1
"""In the place of the time that an earlier release did not write down."""


@dataclass(frozen=True)
class RepeatedSteps:
    """What was logged of `steps` up to `since`, in ms since 1970, is of the first time, and what came later is not."""

    steps: range
    since: int

    @classmethod
    def from_time(cls, steps: range, rewound_at: int | None) -> Self:
        """Of steps that were done once more from that time on, in ms since 1970; None where it was not written down."""
        return cls(steps, UNKNOWN_TIME if rewound_at is None else rewound_at)


def last_repeat_time(repeated: Iterable[RepeatedSteps], step: int) -> int | None:
    """Up to when (ms since 1970) values of `step` are of a time before the newest; None where it is done once."""
    return max((each.since for each in repeated if step in each.steps), default=None)
