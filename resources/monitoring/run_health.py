"""Detect stalled runs and stale checkpoints; record alerts once."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select

from recipes.contracts.recovery_log import RecoveryEvent
from resources.metadata.outbox import emit
from resources.metadata.tables import run_tags
from resources.metadata.tracking.run_data import require_active, write_tags

# Checks whether a running training run, or a command, makes progress: metrics and checkpoints arrive in time. Pure
# functions.

STALLED, CHECKPOINT_STALE = "job.stalled", "job.checkpoint_stale"


@dataclass(frozen=True)
class RunActivity:
    """When a run last showed activity, in milliseconds since 1970.

    Times of what has not happened yet are None. `last_started_at` is the latest start of the job: activity before a resume
    does not count. `first_metric` is when training itself first began.
    """

    last_started_at: int
    first_metric: int | None
    newest_metric: int | None
    newest_checkpoint: int | None


@dataclass(frozen=True)
class SilenceLimits:
    """How many milliseconds a run may log no metric, and save no checkpoint."""

    metric: float
    checkpoint: float


@dataclass(frozen=True)
class Alert:
    """An alert of event type `type`.

    `since` (ms since 1970) distinguishes one occurrence from the next.
    """

    type: str
    since: int
    message: str


def find_alerts(signs: RunActivity, limits: SilenceLimits, now: int) -> Iterator[Alert]:
    """Yield the alerts at `now` (ms since 1970).

    The same silence always gives an equal alert.
    """
    spoke = max(signs.last_started_at, signs.newest_metric or 0)
    if now - spoke > limits.metric:
        yield Alert(STALLED, spoke, f"no metric for more than {format_duration(limits.metric)}")
    if signs.first_metric is None:
        return
    yield from find_checkpoint_alert(
        max(signs.last_started_at, signs.first_metric, signs.newest_checkpoint or 0), limits.checkpoint, now
    )


def find_checkpoint_alert(saved: int, limit: float, now: int) -> Iterator[Alert]:
    """Yield an alert if `limit` ms have passed without a checkpoint.

    `saved` is the time of the newest checkpoint or of the start of training.
    """
    if now - saved > limit:
        yield Alert(CHECKPOINT_STALE, saved, f"no checkpoint in the store for more than {format_duration(limit)}")


def format_duration(milliseconds: float) -> str:
    """Format a duration for people: half a minute is not "0 minutes"."""
    seconds = milliseconds / 1000
    if seconds < 120:
        return f"{seconds:g} second{'' if seconds == 1 else 's'}"
    return f"{seconds / 60:g} minutes"


# Records what happened to a run: an event for subscribers and a tag on the run for users, once for each occurrence.
#
# The tag ensures that it happens once: both are written in one transaction, so an equal tag means that the event exists.

TAG_PREFIX = "health/"


def record_once(connection: Connection, run_id: str, tag: str, value: str, type: str, facts: Mapping[str, Any]) -> bool:
    """Write the event and the tag, unless the run has an equal tag.

    Returns whether they were written.

    Raises:
        HanzoError: there is no such run, or it was deleted.
    """
    require_active(connection, run_id)  # locks the row, so that two concurrent calls write one event
    query = select(run_tags.c.value).where(run_tags.c.run_id == run_id, run_tags.c.key == tag)
    if connection.execute(query).scalar() == value:
        return False
    write_tags(connection, run_id, {tag: value})
    emit(connection, "jobs", type, run_id, {"job_id": run_id, **facts})
    return True


def record_incidents(connection: Connection, run_id: str, incidents: Iterable[RecoveryEvent]) -> None:
    """Record what the program recovered from, each incident under its number in the run."""
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
