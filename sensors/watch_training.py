"""A training job runs -> tell what its program healed, and when metrics or checkpoints stay away (rows I4, Y5). Of a
command: when its checkpoints do.

It follows what is there and not events, so that a look that was missed is made up for by the next.
"""

from contextlib import suppress

import dagster as dg
from pydantic import ValidationError

from hanzo_ml_assets.control_plane import ControlPlane
from recipes.contracts.quantities import parse_duration
from recipes.contracts.recovery_log import read_recovery_log
from recipes.contracts.results import USAGE_FILE as USAGE
from recipes.contracts.results import read_usage
from recipes.storage import uris
from recipes.storage.artifact_store import MANIFEST_FILE, BrokenArtifact, Store
from resources.errors import HanzoError
from resources.jobs.command import checkpoint_policy, read_command
from resources.lineage.run_record import read_record
from resources.metadata.jobs import COMMAND, TRAINING, JobRecord
from resources.metadata.outbox import now_ms
from resources.metadata.tracking.metrics import Metrics
from resources.monitoring.run_health import (
    RunActivity,
    SilenceLimits,
    find_alerts,
    find_checkpoint_alert,
    record_alert,
    record_incidents,
)
from sensors.sensor import sensor

CHECK_INTERVAL_SECONDS = 30
LOSS_METRIC = "train/loss"


@sensor(
    interval=CHECK_INTERVAL_SECONDS,
    description="Tells of each running job what it healed, and whether its metrics and checkpoints come.",
    requests_runs=False,
)
def watch_training(context: dg.SensorEvaluationContext, control_plane: ControlPlane) -> dg.SensorResult:
    with control_plane.database.read() as connection:
        checks = [(job, check_training) for job in control_plane.jobs.running(TRAINING, connection)]
        checks += [(job, check_command) for job in control_plane.jobs.running(COMMAND, connection)]
    for job, check in checks:
        try:
            check(job, control_plane, now_ms())
        # Its run was deleted, say, or its record is of another release: the others are looked at all the same.
        except (HanzoError, BrokenArtifact, ValidationError) as error:
            context.log.warning(f"job {job.id} could not be looked at: {error}")
    return dg.SensorResult(skip_reason=f"training jobs and commands that are running: {len(checks)}")


def check_training(job: JobRecord, control_plane: ControlPlane, now: int) -> None:
    """One look at one job, at `now` in milliseconds. One that waits for GPUs is not to say anything."""
    store, settings = control_plane.store, control_plane.settings.alerts
    record = store.find(uris.run_record(job.id))
    if record is None:  # it has only just begun
        return
    place = uris.run_checkpoints(job.id)
    metrics = Metrics(control_plane.database)
    with control_plane.database.read() as connection:
        begun = control_plane.jobs.last_started_at(job, connection)
        begun = max(begun, control_plane.compute.queued_until(job))
        first = metrics.history(job.id, LOSS_METRIC, 1, connection=connection).points
        latest = metrics.latest(job.id, connection=connection)
    signs = RunActivity(
        last_started_at=begun,
        first_metric=first[0].timestamp if first else None,
        newest_metric=max((point.timestamp for point in latest), default=None),
        newest_checkpoint=newest_checkpoint_time(store, place),
    )
    interval = parse_duration(read_record(store, record).recipe.checkpoint.for_schedule(job.schedule).interval)
    limits = SilenceLimits(parse_duration(settings.stalled_after) * 1000, interval * settings.checkpoint_slack * 1000)
    incidents = read_recovery_log(store, place)
    with control_plane.database.write() as connection:
        record_incidents(connection, job.id, incidents.entries)
        for alert in find_alerts(signs, limits, now):
            record_alert(connection, job.id, alert)


def check_command(job: JobRecord, control_plane: ControlPlane, now: int) -> None:
    """One look at a command, whose time begins when it runs: it says so once in an interval, and may have waited for GPUs.

    What trains is to save. Of another kind, such as an evaluation, only one that has saved before is late.
    """
    store, asked = control_plane.store, read_command(job)
    folder = uris.run_folder(job.id)
    newest = newest_checkpoint_time(store, asked.storage.checkpoints_uri(job.id))
    usage = read_usage(store, folder)
    if not usage.seconds or (newest is None and asked.type != "training"):
        return
    limit = parse_duration(checkpoint_policy(asked).interval) * control_plane.settings.alerts.checkpoint_slack * 1000
    with control_plane.database.write() as connection:
        ran = store.modified_ms(f"{folder}/{USAGE}") - round(usage.seconds * 1000)
        saved = max(control_plane.jobs.last_started_at(job, connection), ran, newest or 0)
        for alert in find_checkpoint_alert(saved, limit, now):
            record_alert(connection, job.id, alert)


def newest_checkpoint_time(store: Store, place: str) -> int | None:
    """When the newest whole checkpoint below `place` arrived, in milliseconds."""
    arrived: list[int] = []
    for uri in store.list(place):
        if uri.endswith("/" + MANIFEST_FILE):
            with suppress(FileNotFoundError):  # retention took it since it was listed: there is a newer one
                arrived.append(store.modified_ms(uri))
    return max(arrived, default=None)
