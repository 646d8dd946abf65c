"""What became of a job after it had ended: how often it was resumed, and how. Its configuration says so, beside what was
submitted.
"""

from pydantic import Field

from recipes.contracts.frozen_model import Frozen
from recipes.contracts.rewind import SentBack

RESUMED = "resumed"
"""The key of a job's configuration."""


class Resumed(Frozen):
    """`sent_back` is all that the run was sent back to, oldest first; `gpus` how many it goes on with now, and `gpus_before`
    with how many it went on at other times, oldest first.
    """

    times: int = 0
    sent_back: tuple[SentBack, ...] = ()
    gpus: int | None = None
    gpus_before: tuple[int, ...] = Field((), exclude_if=lambda value: not value)
