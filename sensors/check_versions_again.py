"""Check a dataset version again on request; split it once no check blocks."""

import dagster as dg

from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.datasets import SPLITS
from hanzo_ml_assets.run_tags import version_tags
from resources.datasets.validations import CHECK_REQUESTED_EVENT
from resources.errors import HanzoError
from sensors.decisions.definition_lookup import find_version_definition
from sensors.sensor import SLOW_INTERVAL_SECONDS, read_cursor, read_new_events, sensor


@sensor(interval=SLOW_INTERVAL_SECONDS, description="Checks dataset versions again on request.")
def check_versions_again(context: dg.SensorEvaluationContext, control_plane: ControlPlane) -> dg.SensorResult:
    requests = []
    with control_plane.database.read() as connection:
        cursor = read_cursor(context, connection)
        for event in read_new_events(cursor, connection, CHECK_REQUESTED_EVENT):
            cursor = cursor.after(event)
            try:
                version = control_plane.datasets.get(event.payload["dataset_id"], connection)
            except HanzoError:  # deleted since
                continue
            home = find_version_definition(context, version)
            requests.append(
                dg.RunRequest(
                    run_key=cursor.run_key(f"check-{event.seq}"),
                    asset_selection=[dg.AssetKey(["datasets", home, step]) for step in ("version", *SPLITS)],
                    tags=version_tags(version),
                )
            )
    return dg.SensorResult(run_requests=requests, cursor=str(cursor))
