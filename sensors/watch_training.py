"""Report recoveries of running jobs, and missing metrics or checkpoints.

Training jobs are checked for all of these, commands for checkpoints only. It reads state, not events, so the next tick makes
up for a missed one.
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
    description="Reports recoveries of running jobs, and alerts when their metrics or checkpoints stop.",
    requests_runs=False,
)
def watch_training(context: dg.SensorEvaluationContext, control_plane: ControlPlane) -> dg.SensorResult:
    with control_plane.database.read() as connection:
        checks = [(job, check_training) for job in control_plane.jobs.running(TRAINING, connection)]
        checks += [(job, check_command) for job in control_plane.jobs.running(COMMAND, connection)]
    for job, check in checks:
        try:
            check(job, control_plane, now_ms())
        # The run may be deleted, or its record from another release: continue with the other jobs.
        except (HanzoError, BrokenArtifact, ValidationError) as error:
            context.log.warning(f"cannot check job {job.id}: {error}")
    return dg.SensorResult(skip_reason=f"training jobs and commands that are running: {len(checks)}")


def check_training(job: JobRecord, control_plane: ControlPlane, now: int) -> None:
    """Check one job at `now`, in milliseconds. Waiting for GPUs raises no alert."""
    store, settings = control_plane.store, control_plane.settings.alerts
    record = store.find(uris.run_record(job.id))
    if record is None:  # it has only just started
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
    """Check one command for late checkpoints, counted from its actual start.

    It reports that once per interval; before, it may have waited for GPUs. Training commands must save checkpoints; others,
    such as evaluations, are late only if they have saved before.
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
    """Return when the newest complete checkpoint below `place` was saved, in milliseconds, or None."""
    arrived: list[int] = []
    for uri in store.list(place):
        if uri.endswith("/" + MANIFEST_FILE):
            with suppress(FileNotFoundError):  # deleted by retention since the listing: a newer one exists
                arrived.append(store.modified_ms(uri))
    return max(arrived, default=None)
