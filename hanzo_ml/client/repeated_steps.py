"""Steps that a run computes again after a rewind or a divergence."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

UNKNOWN_TIME = 2**63 - 1
"""Used instead of a time that an earlier release did not record."""


@dataclass(frozen=True)
class RepeatedSteps:
    """Steps that are trained again.

    Values logged up to `since` (ms since 1970) are from before, later ones are new.
    """

    steps: range
    since: int

    @classmethod
    def from_time(cls, steps: range, rewound_at: int | None) -> Self:
        """Return the steps that were trained again from `rewound_at` (ms since 1970) on.

        None if the time was not recorded.
        """
        return cls(steps, UNKNOWN_TIME if rewound_at is None else rewound_at)


def last_repeat_time(repeated: Iterable[RepeatedSteps], step: int) -> int | None:
    """Return the time (ms since 1970) up to which values of `step` are outdated.

    None if it is not repeated.
    """
    return max((each.since for each in repeated if step in each.steps), default=None)
