"""Artifact downloads for the web UI's links, and answers that disable its gateway and telemetry."""

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from api.artifacts.run_artifacts import checked_path
from api.auth.ownership import require_ownership
from api.auth.permissions import Permission
from api.dependencies import ArtifactLocationsDep, CallerDep, DatabaseDep, RunArtifactsDep, TrackingDep, VerifiedFilesDep
from api.routes.mlflow import artifacts
from api.routes.mlflow import model_versions as version_files
from api.routes.mlflow.artifacts import artifact_response, location_response
from api.routing import Router
from resources.metadata.artifacts.locations import check_proxied, is_proxied, proxied_path
from resources.metadata.ownership import ObjectKind, Reference
from resources.metadata.registry.model_names import version_number
from resources.metadata.registry.source_uris import download_uri
from resources.metadata.registry.version_lifecycle import Registry

router = Router(strict=False, include_in_schema=False)


router.get("/get-artifact", Permission.EXPERIMENTS_READ, head=True)(artifacts.file_of_run)


@router.get("/model-versions/get-artifact", Permission.MODELS_READ)
def get_version_artifact(
    name: str,
    version: str,
    path: str,
    request: Request,
    tracking: TrackingDep,
    run_artifacts: RunArtifactsDep,
    database: DatabaseDep,
    files: VerifiedFilesDep,
    locations: ArtifactLocationsDep,
    caller: CallerDep,
) -> Response:
    """Download a file of a version from its source: version store, run or logged model."""
    checked_path(path)
    with database.read() as connection:
        found = Registry(database).get(caller.model(name), version_number(version), connection)
        root = download_uri(connection, found).rstrip("/")
    if is_proxied(root) and version_files.is_version_path(proxied_path(root)):
        _, stored, number = proxied_path(root).split("/")
        return version_files.download(stored, number, path, request, database, files, caller)
    if root.startswith("runs:/"):
        run_id, *folders = root.removeprefix("runs:/").split("/")
        require_ownership(database, caller, Reference(ObjectKind.RUN, run_id))
        return artifact_response(run_artifacts, tracking.runs.get(run_id).id, "/".join([*folders, path]), request)
    check_proxied(root)
    return location_response(locations.locate(f"{proxied_path(root)}/{path}", caller.organization), request)


@router.get("/ajax-api/2.0/mlflow/gateway-proxy", Permission.SERVER_READ)
@router.post("/ajax-api/2.0/mlflow/gateway-proxy", Permission.SERVER_READ, read_only=True)
def no_gateway() -> Response:
    """List no language models: the page of runs shows an error without an answer."""
    return JSONResponse({"endpoints": []})


@router.get("/ajax-api/3.0/mlflow/ui-telemetry", Permission.SERVER_READ)
def telemetry() -> Response:
    """Disable the UI's telemetry, which would report clicks to MLflow's makers."""
    return JSONResponse({"disable_ui_telemetry": True, "disable_ui_events": [], "ui_rollout_percentage": 0})


@router.post("/ajax-api/3.0/mlflow/ui-telemetry", Permission.SERVER_READ, read_only=True)
def no_telemetry() -> Response:
    return JSONResponse({"status": "disabled"})
