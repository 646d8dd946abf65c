"""A dataset version was created -> check it, and split it if no check blocks.

A prepared version has its splits already: they are checked, and kept.
"""

import dagster as dg

from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.datasets import SPLITS
from hanzo_ml_assets.run_tags import version_tags
from resources.datasets.validations import NOT_CHECKED
from resources.errors import HanzoError
from sensors.decisions.definition_lookup import find_version_definition
from sensors.sensor import INTERVAL_SECONDS, read_cursor, read_new_events, sensor


@sensor(interval=INTERVAL_SECONDS, description="Checks and splits each new dataset version.")
def split_new_versions(context: dg.SensorEvaluationContext, control_plane: ControlPlane) -> dg.SensorResult:
    requests = []
    with control_plane.database.read() as connection:
        cursor = read_cursor(context, connection)
        for event in read_new_events(cursor, connection, "dataset.created"):
            cursor = cursor.after(event)
            try:
                version = control_plane.datasets.get(event.payload["dataset_id"], connection)
            except HanzoError:  # deleted since
                continue
            standing = control_plane.validations.standings([version.id], connection)[version.id]
            if standing.blocked or (version.splits and standing != NOT_CHECKED):
                continue
            home = find_version_definition(context, version)
            requests.append(
                dg.RunRequest(
                    run_key=cursor.run_key(f"split-{version.id}"),
                    asset_selection=[dg.AssetKey(["datasets", home, step]) for step in ("version", *SPLITS)],
                    tags=version_tags(version),
                )
            )
    return dg.SensorResult(run_requests=requests, cursor=str(cursor))
