"""Deploy a version when it is promoted to production or the engine lost it."""

import dagster as dg

from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.deployment import PROMOTED_EVENT
from resources.metadata.registry.deployments import LOST_EVENT, find_by_promotion
from resources.metadata.registry.model_names import ModelKey
from sensors.decisions.definition_lookup import find_definition
from sensors.sensor import INTERVAL_SECONDS, read_cursor, read_new_events, sensor


@sensor(interval=INTERVAL_SECONDS, description="Deploys each version that is promoted to production or lost by the engine.")
def deploy_promotions(context: dg.SensorEvaluationContext, control_plane: ControlPlane) -> dg.SensorResult:
    requests = []
    promotions = []
    with control_plane.database.read() as connection:
        cursor = read_cursor(context, connection)
        for event in read_new_events(cursor, connection, PROMOTED_EVENT, LOST_EVENT):
            cursor = cursor.after(event)
            name, run_id, promoted = event.key, event.payload["run_id"], event.type == PROMOTED_EVENT
            # Clients may promote a bare pointer, as MLflow allows: there is nothing to deploy and no run here made it.
            if promoted and (event.payload["stage"] != "production" or not event.payload.get("servable", True)):
                continue
            home = find_definition(context, "models", name)
            model = ModelKey(event.payload["organization"], name)
            version = control_plane.registry.find(model, event.payload["version"], connection)
            if version is None:  # deleted or renamed since, and therefore not in production
                continue
            deployed = find_by_promotion(connection, event.seq if promoted else event.payload["promotion"])
            ended = deployed is not None and deployed.status != "deploying"
            if version.stage != "production" or ended:
                continue
            # Requesting an unknown partition fails the tick, which would block all later promotions.
            context.instance.add_dynamic_partitions(f"{home}-runs", [run_id])
            if promoted:
                metadata = {"version": version.version, "user": event.payload["user_id"], "event": event.seq}
                promotions.append(
                    dg.AssetMaterialization(["models", home, "promotion"], partition=run_id, metadata=metadata)
                )
            requests.append(
                dg.RunRequest(
                    run_key=cursor.run_key(f"deploy-{event.seq}"),
                    partition_key=run_id,
                    asset_selection=[dg.AssetKey(["models", home, "deployment"])],
                )
            )
    return dg.SensorResult(run_requests=requests, asset_events=promotions, cursor=str(cursor))
