"""Record the resource usage, cost and recoveries of failed and cancelled jobs.

The program writes its usage as it runs (`recipes.contracts.results`), and may do so once more while a cancelled job ends:
therefore wait for its Dagster run to finish.
"""

import dagster as dg
from pydantic import ValidationError

from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.run_metrics import machine_tags, record_usage
from recipes.contracts.job import Hardware
from recipes.contracts.recovery_log import read_recovery_log
from recipes.contracts.results import Usage, read_usage
from recipes.storage import uris
from recipes.storage.artifact_store import BrokenArtifact, Store
from resources.compute.base import GRACE_SECONDS
from resources.errors import HanzoError
from resources.jobs.command import read_command
from resources.lineage.run_record import read_record
from resources.metadata.jobs import COMMAND, TRAINING, JobRecord
from resources.metadata.outbox import Event, now_ms
from resources.metadata.tracking.run_data import RunData
from resources.monitoring.run_health import record_incidents
from sensors.decisions.job_runs import has_no_unfinished_run
from sensors.sensor import SLOW_INTERVAL_SECONDS, read_cursor, read_new_events, sensor

MAX_WAIT_MS = 2 * GRACE_SECONDS * 1000
"""How long to wait for an ended job's Dagster run: a run that never ends must not block other events."""


@sensor(
    interval=SLOW_INTERVAL_SECONDS,
    description="Records the usage and the recoveries of each failed or cancelled run.",
    requests_runs=False,
)
def account_ended_jobs(context: dg.SensorEvaluationContext, control_plane: ControlPlane) -> dg.SensorResult:
    with control_plane.database.read() as connection:
        cursor = read_cursor(context, connection)
        events = read_new_events(cursor, connection, "job.failed", "job.cancelled")
    for event in events:
        if now_ms() - event.created_at < MAX_WAIT_MS and not has_no_unfinished_run(context.instance, event.key):
            break
        try:
            record_job_usage(event, control_plane)
        # The run may be deleted, or its files from another release: one event must not block those after it.
        except (HanzoError, BrokenArtifact, ValidationError) as error:
            context.log.warning(f"job {event.key}: {error}")
        cursor = cursor.after(event)
    return dg.SensorResult(cursor=str(cursor))


def record_job_usage(event: Event, control_plane: ControlPlane) -> None:
    """Record usage, unless the job was resumed or never started."""
    usage = read_usage(control_plane.store, uris.run_folder(event.key))
    job = control_plane.jobs.read(event.key)
    if usage == Usage() or job.status not in ("failed", "cancelled") or not (job.type == TRAINING or usage.gpus):
        return
    gpu_type = find_hardware(job, control_plane.store).gpu_type
    with control_plane.database.write() as connection:
        record_usage(connection, job.id, usage, gpu_type, event.created_at, control_plane)
        if job.type == TRAINING:
            incidents = read_recovery_log(control_plane.store, uris.run_checkpoints(job.id))
            record_incidents(connection, job.id, incidents.entries)
        RunData(control_plane.database).log_batch(job.id, tags=machine_tags(usage.machine), connection=connection)


def find_hardware(job: JobRecord, store: Store) -> Hardware:
    """Return the hardware that a job ran on."""
    if job.type == COMMAND:
        return read_command(job).resources
    place = uris.run_record(job.id)
    record = store.find(place)
    if record is None:  # written before the program starts
        raise BrokenArtifact(f"{place} is missing")
    return read_record(store, record).recipe.hardware
