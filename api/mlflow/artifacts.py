"""Files of runs over MLflow's API: the listing, and the proxy that uploads and downloads them.

The proxy serves `mlflow-artifacts:/{experiment}/{run}/artifacts/...` and nothing else.
"""

import mimetypes
import tempfile
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import FileResponse
from starlette.concurrency import run_in_threadpool

from api.dependencies import RunArtifactsOf, SettingsOf, TrackingOf
from api.mlflow.messages import answer
from api.requests import StrictRoute
from api.run_artifacts import Entry, RunArtifacts, checked_path
from resources.errors import invalid, not_found
from resources.metadata.run_data import check_run_active
from resources.metadata.run_states import Run
from resources.metadata.tracking import Tracking

router = APIRouter(tags=["mlflow"], route_class=StrictRoute)


@router.get("/mlflow/artifacts/list")
def list_artifacts(
    tracking: TrackingOf,
    artifacts: RunArtifactsOf,
    run_id: Annotated[str | None, Query()] = None,
    run_uuid: Annotated[str | None, Query()] = None,
    path: str = "",
) -> Response:
    named = run_id or run_uuid
    if not named:
        raise invalid("Missing value for required parameter 'run_id'.")
    run = tracking.runs.get(named)
    files = [file_message(entry, entry.path) for entry in artifacts.entries(run.id, path)]
    return answer(root_uri=run.artifact_uri, files=files)


@router.get("/mlflow-artifacts/artifacts")
def list_proxied(tracking: TrackingOf, artifacts: RunArtifactsOf, path: str = "") -> Response:
    """Entries named relative to `path`, as the client of the proxy expects."""
    run, folder = locate(tracking, path)
    entries = artifacts.entries(run.id, folder)
    return answer(files=[file_message(entry, entry.path.rpartition("/")[2]) for entry in entries])


@router.get("/mlflow-artifacts/artifacts/{artifact_path:path}")
def download(artifact_path: str, tracking: TrackingOf, artifacts: RunArtifactsOf) -> Response:
    run, path = locate(tracking, artifact_path)
    return file_response(artifacts, run.id, path)


@router.put("/mlflow-artifacts/artifacts/{artifact_path:path}")
async def upload(
    artifact_path: str, request: Request, tracking: TrackingOf, artifacts: RunArtifactsOf, settings: SettingsOf
) -> Response:
    run, path = await run_in_threadpool(locate, tracking, artifact_path)
    check_run_active(run.id, run.lifecycle_stage)
    await receive(request, artifacts, run.id, checked_path(path), settings.home)
    return answer()


@router.delete("/mlflow-artifacts/artifacts/{artifact_path:path}")
def delete(artifact_path: str, tracking: TrackingOf, artifacts: RunArtifactsOf) -> Response:
    run, path = locate(tracking, artifact_path)
    check_run_active(run.id, run.lifecycle_stage)
    artifacts.delete(run.id, path)
    return answer()


async def receive(request: Request, artifacts: RunArtifacts, run_id: str, path: str, home: Path) -> str:
    """Stream the body into a file beside the store, then publish it: an upload that breaks off leaves nothing."""
    folder = home / "uploads"
    await run_in_threadpool(folder.mkdir, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        async for chunk in request.stream():
            await run_in_threadpool(file.write, chunk)
        file.flush()
        return await run_in_threadpool(artifacts.put, run_id, path, Path(file.name))


def locate(tracking: Tracking, proxied: str) -> tuple[Run, str]:
    """`{experiment}/{run}/artifacts[/PATH]` as the run and PATH ("" for the folder itself)."""
    experiment, _, rest = checked_path(proxied).partition("/")
    run_id, _, rest = rest.partition("/")
    folder, _, path = rest.partition("/")
    if folder != "artifacts":
        raise not_found("There is no such artifact location: it must be EXPERIMENT_ID/RUN_ID/artifacts/PATH")
    run = tracking.runs.get(run_id)
    if str(run.experiment_id) != experiment:
        raise not_found(f"Run with id={run_id} not found in experiment {experiment}")
    return run, path


def file_response(artifacts: RunArtifacts, run_id: str, path: str) -> Response:
    """A file as a download. What users uploaded is never shown in the origin of this server."""
    name = path.rpartition("/")[2]
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
    headers = {"X-Content-Type-Options": "nosniff", "Content-Security-Policy": "sandbox; default-src 'none'"}
    local = artifacts.local_file(run_id, path)
    if local is not None:
        return FileResponse(local, media_type=kind, filename=name, headers=headers)
    headers["Content-Disposition"] = "attachment"
    return Response(artifacts.read(run_id, path), media_type=kind, headers=headers)


def file_message(entry: Entry, path: str) -> dict[str, str | int | bool]:
    message: dict[str, str | int | bool] = {"path": path, "is_dir": entry.is_dir}
    return message if entry.size is None else {**message, "file_size": entry.size}
