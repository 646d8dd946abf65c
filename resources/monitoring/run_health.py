"""Detect stalled runs and stale checkpoints; record alerts once."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select

from recipes.contracts.recovery_log import RecoveryEvent
from resources.metadata.outbox import emit
from resources.metadata.tables import run_tags
from resources.metadata.tracking.run_data import require_active, write_tags

# Whether a running training run, or a command, does what it should: metrics come, checkpoints come (rows I4, Y5). Pure.

STALLED, CHECKPOINT_STALE = "job.stalled", "job.checkpoint_stale"


@dataclass(frozen=True)
class RunActivity:
    """Times in milliseconds; none of what has not come yet.

    `last_started_at` is when the job was started last, which is later than what it said before it was resumed;
    `first_metric` is when training itself began, the first time.
    """

    last_started_at: int
    first_metric: int | None
    newest_metric: int | None
    newest_checkpoint: int | None


@dataclass(frozen=True)
class SilenceLimits:
    """Milliseconds without a metric, and without a checkpoint, after which something is wrong."""

    metric: float
    checkpoint: float


@dataclass(frozen=True)
class Alert:
    """`type` is the event's; `since` in milliseconds tells one occurrence from the next."""

    type: str
    since: int
    message: str


def find_alerts(signs: RunActivity, limits: SilenceLimits, now: int) -> Iterator[Alert]:
    """What is wrong at `now`, in milliseconds. The same silence gives an equal alert however often it is looked at."""
    spoke = max(signs.last_started_at, signs.newest_metric or 0)
    if now - spoke > limits.metric:
        yield Alert(STALLED, spoke, f"no metric for more than {format_duration(limits.metric)}")
    if signs.first_metric is None:
        return
    yield from find_checkpoint_alert(
        max(signs.last_started_at, signs.first_metric, signs.newest_checkpoint or 0), limits.checkpoint, now
    )


def find_checkpoint_alert(saved: int, limit: float, now: int) -> Iterator[Alert]:
    """That the newest checkpoint is of `saved`, or that there is none since the run got going then."""
    if now - saved > limit:
        yield Alert(CHECKPOINT_STALE, saved, f"no checkpoint in the store for more than {format_duration(limit)}")


def format_duration(milliseconds: float) -> str:
    """As people say it: half a minute is not "0 minutes"."""
    seconds = milliseconds / 1000
    if seconds < 120:
        return f"{seconds:g} second{'' if seconds == 1 else 's'}"
    return f"{seconds / 60:g} minutes"


# What happened to a run on its way: an event for whoever listens and a tag on the run for whoever looks, once for each.
#
# The tag is what makes it once: an equal one that is there already means that the event was written, in one transaction.

TAG_PREFIX = "health/"


def record_once(connection: Connection, run_id: str, tag: str, value: str, type: str, facts: Mapping[str, Any]) -> bool:
    """Write the event and the tag, unless the run has an equal tag already. True when it was news.

    Raises:
        HanzoError: there is no such run, or it was deleted.
    """
    require_active(connection, run_id)  # locks its row: two who look at once do not tell it twice
    query = select(run_tags.c.value).where(run_tags.c.run_id == run_id, run_tags.c.key == tag)
    if connection.execute(query).scalar() == value:
        return False
    write_tags(connection, run_id, {tag: value})
    emit(connection, "jobs", type, run_id, {"job_id": run_id, **facts})
    return True


def record_incidents(connection: Connection, run_id: str, incidents: Iterable[RecoveryEvent]) -> None:
    """What the program has healed, each under its number in the run."""
    for number, incident in enumerate(incidents, 1):
        facts = incident.model_dump(mode="json", exclude={"kind"}) | {"message": incident.message}
        record_once(connection, run_id, f"{TAG_PREFIX}incident_{number}", incident.message, f"job.{incident.kind}", facts)


def record_alert(connection: Connection, run_id: str, alert: Alert) -> None:
    name = alert.type.removeprefix("job.")
    record_once(
        connection,
        run_id,
        TAG_PREFIX + name,
        f"{alert.message}, since {alert.since}",
        alert.type,
        {"message": alert.message, "since": alert.since},
    )
