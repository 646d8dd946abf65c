"""Whether a running training run, or a command, does what it should: metrics come, checkpoints come (rows I4, Y5). Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

STALLED, STALE = "job.stalled", "job.checkpoint_stale"


@dataclass(frozen=True)
class Signs:
    """Times in milliseconds; none of what has not come yet.

    `begun_at` is when the job was started last, which is later than what it said before it was resumed; `first_metric` is
    when training itself began, the first time.
    """

    begun_at: int
    first_metric: int | None
    newest_metric: int | None
    newest_checkpoint: int | None


@dataclass(frozen=True)
class Limits:
    """Milliseconds without a metric, and without a checkpoint, after which something is wrong."""

    metric: float
    checkpoint: float


@dataclass(frozen=True)
class Alert:
    """`type` is the event's; `since` in milliseconds tells one occurrence from the next."""

    type: str
    since: int
    words: str


def alerts(signs: Signs, limits: Limits, now: int) -> Iterator[Alert]:
    """What is wrong at `now`, in milliseconds. The same silence gives an equal alert however often it is looked at."""
    spoke = max(signs.begun_at, signs.newest_metric or 0)
    if now - spoke > limits.metric:
        yield Alert(STALLED, spoke, f"no metric for more than {duration(limits.metric)}")
    if signs.first_metric is None:
        return
    yield from late(max(signs.begun_at, signs.first_metric, signs.newest_checkpoint or 0), limits.checkpoint, now)


def late(saved: int, limit: float, now: int) -> Iterator[Alert]:
    """That the newest checkpoint is of `saved`, or that there is none since the run got going then."""
    if now - saved > limit:
        yield Alert(STALE, saved, f"no checkpoint in the store for more than {duration(limit)}")


def duration(milliseconds: float) -> str:
    """As people say it: half a minute is not "0 minutes"."""
    seconds = milliseconds / 1000
    if seconds < 120:
        return f"{seconds:g} second{'' if seconds == 1 else 's'}"
    return f"{seconds / 60:g} minutes"
