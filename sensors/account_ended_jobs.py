"""A job failed or was cancelled -> its run says what it had used until then, and on what: it has cost that all the same. And
what it was healed of since `watch_training` looked last.

The program wrote it down as it went on (`recipes.usage`). It may do so once more while a cancelled job ends, so that its
run is waited for.
"""

import dagster as dg
from pydantic import ValidationError

from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.machine_tags import machine_tags
from hanzo_ml_assets.used import tell_used
from recipes.contracts.job import Hardware
from recipes.contracts.recovery_log import read_incidents
from recipes.storage import uris
from recipes.storage.artifact_store import BrokenArtifact, Store
from recipes.usage import Usage, read_usage
from resources.compute.base import GRACE_SECONDS
from resources.errors import HanzoError
from resources.jobs.command import asked_of
from resources.lineage.run_record import read_record
from resources.metadata.jobs import COMMAND, TRAINING, JobRecord
from resources.metadata.outbox import Event, now_ms
from resources.metadata.tracking.run_data import RunData
from resources.monitoring.run_health import tell_incidents
from sensors.decisions.job_runs import is_gone
from sensors.event_cursor import SELDOM_SECONDS, new_events, position
from sensors.sensor import sensor

LONGEST_MS = 2 * GRACE_SECONDS * 1000
"""How long an ended job's run is waited for: one that never ends holds up no other."""


@sensor(
    interval=SELDOM_SECONDS,
    description="Says what each failed or cancelled run had used, and was healed of.",
    requests_runs=False,
)
def account_ended_jobs(context: dg.SensorEvaluationContext, control_plane: ControlPlane) -> dg.SensorResult:
    with control_plane.database.read() as connection:
        cursor = position(context, connection)
        events = new_events(cursor, connection, "job.failed", "job.cancelled")
    for event in events:
        if now_ms() - event.created_at < LONGEST_MS and not is_gone(context.instance, event.key):
            break
        try:
            account(event, control_plane)
        # Its run was deleted, say, or what it wrote is of another release: one event is not to hold up all that follow.
        except (HanzoError, BrokenArtifact, ValidationError) as error:
            context.log.warning(f"job {event.key}: {error}")
        cursor = cursor.after(event)
    return dg.SensorResult(cursor=str(cursor))


def account(event: Event, control_plane: ControlPlane) -> None:
    """Nothing of a job that goes on again, or has not begun."""
    usage = read_usage(control_plane.store, uris.run_folder(event.key))
    job = control_plane.jobs.read(event.key)
    if usage == Usage() or job.status not in ("failed", "cancelled") or not (job.type == TRAINING or usage.gpus):
        return
    gpu_type = hardware_of(job, control_plane.store).gpu_type
    with control_plane.database.write() as connection:
        tell_used(connection, job.id, usage, gpu_type, event.created_at, control_plane)
        if job.type == TRAINING:
            incidents = read_incidents(control_plane.store, uris.run_checkpoints(job.id))
            tell_incidents(connection, job.id, incidents.entries)
        RunData(control_plane.database).log_batch(job.id, tags=machine_tags(usage.machine), connection=connection)


def hardware_of(job: JobRecord, store: Store) -> Hardware:
    """What a job that has run was given."""
    if job.type == COMMAND:
        return asked_of(job).resources
    place = uris.run_record(job.id)
    record = store.find(place)
    if record is None:  # it was written before its program began
        raise BrokenArtifact(f"{place} is missing")
    return read_record(store, record).recipe.hardware
