"""A sweep goes on -> look at its trials, stop those that lead nowhere, start the next ones (rows K1-K7).

It follows the rows and not the events: whatever was killed in between, the next look finds the sweep as it stands.
"""

import dagster as dg

from hanzo_ml_assets.control_plane import ControlPlane
from resources.errors import HanzoError
from resources.hpo.advance import advance
from resources.metadata.sweeps import Sweeps
from sensors.event_cursor import SELDOM_SECONDS
from sensors.sensor import sensor
from sensors.stop_cancelled_jobs import IN_PROGRESS

NOT_GONE = [*IN_PROGRESS, dg.DagsterRunStatus.CANCELING]


@sensor(interval=SELDOM_SECONDS, description="Runs the trials of each sweep that was started.", requests_runs=False)
def run_sweeps(context: dg.SensorEvaluationContext, control_plane: ControlPlane) -> dg.SensorResult:
    def is_gone(job_id: str) -> bool:
        filters = dg.RunsFilter(tags={"dagster/partition": job_id}, statuses=NOT_GONE)
        return not context.instance.get_runs(filters, limit=1)

    moved = []
    for sweep_id in Sweeps(control_plane.database).running():
        try:
            if advance(control_plane.database, control_plane.store, sweep_id, is_gone):
                moved.append(sweep_id)
        except HanzoError as error:  # one that stumbles holds up no other
            context.log.warning(f"sweep {sweep_id} cannot go on: {error.message}")
    return dg.SensorResult(skip_reason=f"went on: {', '.join(moved)}" if moved else "no sweep has anything to do")
