"""Start each submitted preparation exactly once: its run key is the job's id."""

import dagster as dg

from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.preparation import PREPARATION_TAG
from resources.metadata.jobs import PREPARATION, JobRecord
from sensors.decisions.definition_lookup import find_definition
from sensors.sensor import INTERVAL_SECONDS, MAX_EVENTS_PER_TICK, sensor


@sensor(interval=INTERVAL_SECONDS, description="Starts each submitted preparation of a dataset version.")
def start_submitted_preparations(context: dg.SensorEvaluationContext, control_plane: ControlPlane) -> dg.SensorResult:
    # Read state, not events: jobs beyond the limit come up at the next tick, and run keys prevent second runs.
    with control_plane.database.read() as connection:
        jobs = [job for job in control_plane.jobs.queued(connection) if job.type == PREPARATION]
    return dg.SensorResult(run_requests=[make_run_request(context, job) for job in jobs[:MAX_EVENTS_PER_TICK]])


def make_run_request(context: dg.SensorEvaluationContext, job: JobRecord) -> dg.RunRequest:
    name, _, _ = str(job.config["dataset"]).partition("@")
    asset = dg.AssetKey(["datasets", find_definition(context, "datasets", name), "prepared"])
    return dg.RunRequest(run_key=job.id, asset_selection=[asset], tags={PREPARATION_TAG: job.id})
