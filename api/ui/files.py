"""What the web UI's links and start page ask for: a run's file as a download, and that nobody is to be observed."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse

from api.dependencies import RunArtifactsOf, TrackingOf
from api.mlflow.artifacts import artifact_response
from resources.errors import invalid

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


@router.get("/ajax-api/3.0/mlflow/ui-telemetry")
def telemetry() -> Response:
    """The UI reports its user's clicks to MLflow's makers unless it is told not to."""
    return JSONResponse({"disable_ui_telemetry": True, "disable_ui_events": [], "ui_rollout_percentage": 0})


@router.post("/ajax-api/3.0/mlflow/ui-telemetry")
def no_telemetry() -> Response:
    return JSONResponse({"status": "disabled"})
