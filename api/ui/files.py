"""What the web UI's links and start page ask for: files as downloads, and that there is no gateway and no observer."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse

from api.dependencies import CallerOf, DatabaseOf, RunArtifactsOf, TrackingOf, VerifiedFilesOf
from api.mlflow.artifacts import artifact_response, locate
from api.mlflow.version_files import download, is_of_version
from api.run_artifacts import checked_path
from resources.errors import invalid
from resources.metadata.model_version_rules import version_number
from resources.metadata.model_version_sources import download_uri
from resources.metadata.registry import Registry

router = APIRouter(include_in_schema=False)


@router.get("/get-artifact")
@router.head("/get-artifact", include_in_schema=False)
def get_artifact(
    path: str,
    request: Request,
    tracking: TrackingOf,
    artifacts: RunArtifactsOf,
    run_id: Annotated[str | None, Query()] = None,
    run_uuid: Annotated[str | None, Query()] = None,
) -> Response:
    named = run_id or run_uuid
    if not named:
        raise invalid("Missing value for required parameter 'run_id'.")
    return artifact_response(artifacts, tracking.runs.get(named).id, path, request)


@router.get("/model-versions/get-artifact")
def get_version_artifact(
    name: str,
    version: str,
    path: str,
    request: Request,
    tracking: TrackingOf,
    artifacts: RunArtifactsOf,
    database: DatabaseOf,
    files: VerifiedFilesOf,
    caller: CallerOf,
) -> Response:
    """A file of a version, wherever its source says that its files are."""
    with database.read() as connection:
        found = Registry(database).get(name, version_number(version), connection, caller.organization)
        source = download_uri(connection, found)
    root = checked_path(source.removeprefix("mlflow-artifacts:/").strip("/"))
    if is_of_version(root):
        return download(name, version, path, request, database, files, caller)
    place = locate(tracking, f"{root}/{checked_path(path)}")
    return artifact_response(artifacts, place.owner, place.path, request)


@router.get("/ajax-api/2.0/mlflow/gateway-proxy")
def no_gateway() -> Response:
    """The page of runs asks which language models a gateway offers, and shows an error unless it is told that none."""
    return JSONResponse({"endpoints": []})


@router.get("/ajax-api/3.0/mlflow/ui-telemetry")
def telemetry() -> Response:
    """The UI reports its user's clicks to MLflow's makers unless it is told not to."""
    return JSONResponse({"disable_ui_telemetry": True, "disable_ui_events": [], "ui_rollout_percentage": 0})


@router.post("/ajax-api/3.0/mlflow/ui-telemetry")
def no_telemetry() -> Response:
    return JSONResponse({"status": "disabled"})
