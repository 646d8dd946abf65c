"""A training job runs -> tell what its program healed, and when metrics or checkpoints stay away (rows I4, Y5). Of a
command: when its checkpoints do.

It follows what is there and not events, so that a look that was missed is made up for by the next.
"""

from contextlib import suppress

import dagster as dg
from pydantic import ValidationError

from hanzo_ml_assets.control_plane import ControlPlane
from recipes.contracts.quantities import seconds_of
from recipes.contracts.recovery_log import read_incidents
from recipes.storage import uris
from recipes.storage.artifact_store import MANIFEST, BrokenArtifact, Store
from recipes.usage import NAME as USAGE
from recipes.usage import read_usage
from resources.errors import HanzoError
from resources.jobs.command import asked_of, policy_of
from resources.lineage.run_record import read_record
from resources.metadata.jobs import COMMAND, TRAINING, JobRecord
from resources.metadata.outbox import now_ms
from resources.metadata.tracking.metrics import Metrics
from resources.monitoring.run_health import tell_alert, tell_incidents
from resources.run_health import Limits, Signs, alerts, late
from sensors.sensor import sensor

LOOK_SECONDS = 30
LOSS = "train/loss"


@sensor(
    interval=LOOK_SECONDS,
    description="Tells of each running job what it healed, and whether its metrics and checkpoints come.",
    requests_runs=False,
)
def watch_training(context: dg.SensorEvaluationContext, control_plane: ControlPlane) -> dg.SensorResult:
    with control_plane.database.read() as connection:
        looks = [(job, look_at) for job in control_plane.jobs.running(TRAINING, connection)]
        looks += [(job, look_at_command) for job in control_plane.jobs.running(COMMAND, connection)]
    for job, look in looks:
        try:
            look(job, control_plane, now_ms())
        # Its run was deleted, say, or its record is of another release: the others are looked at all the same.
        except (HanzoError, BrokenArtifact, ValidationError) as error:
            context.log.warning(f"job {job.id} could not be looked at: {error}")
    return dg.SensorResult(skip_reason=f"training jobs and commands that are running: {len(looks)}")


def look_at(job: JobRecord, control_plane: ControlPlane, now: int) -> None:
    """One look at one job, at `now` in milliseconds. One that waits for GPUs is not to say anything."""
    store, settings = control_plane.store, control_plane.settings.alerts
    record = store.find(uris.run_record(job.id))
    if record is None:  # it has only just begun
        return
    place = uris.run_checkpoints(job.id)
    metrics = Metrics(control_plane.database)
    with control_plane.database.read() as connection:
        begun = control_plane.jobs.begun_at(job, connection)
        begun = max(begun, control_plane.compute.queued_until(job))
        first = metrics.history(job.id, LOSS, 1, connection=connection).points
        latest = metrics.latest(job.id, connection=connection)
    signs = Signs(
        begun_at=begun,
        first_metric=first[0].timestamp if first else None,
        newest_metric=max((point.timestamp for point in latest), default=None),
        newest_checkpoint=newest_manifest(store, place),
    )
    interval = seconds_of(read_record(store, record).recipe.checkpoint.under(job.schedule).interval)
    limits = Limits(seconds_of(settings.stalled_after) * 1000, interval * settings.checkpoint_slack * 1000)
    incidents = read_incidents(store, place)
    with control_plane.database.write() as connection:
        tell_incidents(connection, job.id, incidents.entries)
        for alert in alerts(signs, limits, now):
            tell_alert(connection, job.id, alert)


def look_at_command(job: JobRecord, control_plane: ControlPlane, now: int) -> None:
    """One look at a command, whose time begins when it runs: it says so once in an interval, and may have waited for GPUs.

    What trains is to save. Of another kind, such as an evaluation, only one that has saved before is late.
    """
    store, asked = control_plane.store, asked_of(job)
    folder = uris.run_folder(job.id)
    newest = newest_manifest(store, asked.storage.checkpoints_of(job.id))
    used = read_usage(store, folder)
    if not used.seconds or (newest is None and asked.type != "training"):
        return
    limit = seconds_of(policy_of(asked).interval) * control_plane.settings.alerts.checkpoint_slack * 1000
    with control_plane.database.write() as connection:
        ran = store.modified(f"{folder}/{USAGE}") - round(used.seconds * 1000)
        saved = max(control_plane.jobs.begun_at(job, connection), ran, newest or 0)
        for alert in late(saved, limit, now):
            tell_alert(connection, job.id, alert)


def newest_manifest(store: Store, place: str) -> int | None:
    """When the newest whole checkpoint below `place` arrived, in milliseconds."""
    arrived: list[int] = []
    for uri in store.list(place):
        if uri.endswith("/" + MANIFEST):
            with suppress(FileNotFoundError):  # retention took it since it was listed: there is a newer one
                arrived.append(store.modified(uri))
    return max(arrived, default=None)
