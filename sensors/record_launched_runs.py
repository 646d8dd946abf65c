"""Record the job of each training launched in the Dagster UI."""

from contextlib import suppress

import dagster as dg
from pydantic import ValidationError

from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.training import TrainingConfig, record_launch
from resources.errors import HanzoError
from sensors.decisions.job_runs import PARTITION_TAG
from sensors.sensor import SLOW_INTERVAL_SECONDS, sensor


@sensor(
    interval=SLOW_INTERVAL_SECONDS,
    description="Records the job of each training that was launched in this UI and is queued.",
    requests_runs=False,
)
def list_clicked_runs(context: dg.SensorEvaluationContext, control_plane: ControlPlane) -> dg.SensorResult:
    for run in context.instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.QUEUED])):
        run_id, key = run.tags.get(PARTITION_TAG), find_trained_asset(run)
        if run_id is None or key is None or control_plane.jobs.find_by_id(run_id):
            continue
        with suppress(HanzoError, ValidationError):  # the run itself fails with this error
            record_launch(run_id, key.path[1], read_launch_config(run, key), control_plane, "queued")
    return dg.SensorResult()


def find_trained_asset(run: dg.DagsterRun) -> dg.AssetKey | None:
    """Return the asset that a run trains, or None."""
    keys = (key for key in run.asset_selection or () if key.path[0] == "models" and key.path[-1] == "checkpoint")
    return next(keys, None)


def read_launch_config(run: dg.DagsterRun, key: dg.AssetKey) -> dict[str, object]:
    """Return the configuration entered in the launchpad. Raises ValidationError."""
    asked = run.run_config.get("ops", {}).get(key.to_python_identifier(), {}).get("config", {})
    return TrainingConfig(**asked).overrides
