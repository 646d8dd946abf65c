"""Files of runs and logged models over MLflow's API: the listing, and the proxy that uploads and downloads them.

The proxy serves `mlflow-artifacts:/{experiment}/{run}/artifacts/...`, `mlflow-artifacts:/{experiment}/models/{model}/
artifacts/...` and nothing else.
"""

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from api.checksums import HEADER, promised
from api.dependencies import CallerOf, DatabaseOf, RunArtifactsOf, StoreOf, TrackingOf
from api.file_response import file_response
from api.mlflow.messages import answer
from api.mlflow.version_files import is_of_version, version_entries
from api.requests import StrictRoute
from api.run_artifacts import Entry, RunArtifacts, checked_folder, checked_path
from api.verified_files import Uploaded
from resources.errors import invalid, not_found
from resources.metadata.logged_model_states import no_model
from resources.metadata.run_data import check_run_active
from resources.metadata.tracking import Tracking

MAX_SMALL = 10 * 1024 * 1024

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
def list_proxied(
    tracking: TrackingOf,
    artifacts: RunArtifactsOf,
    database: DatabaseOf,
    store: StoreOf,
    caller: CallerOf,
    path: str = "",
) -> Response:
    """Entries named relative to `path`, as the client of the proxy expects."""
    folder = checked_folder(path)
    if is_of_version(folder):
        found = version_entries(database, store, folder, caller.organization)
        return answer(files=[file_message(entry, entry.path) for entry in found])
    place = locate(tracking, folder)
    entries = artifacts.entries(place.owner, place.path)
    return answer(files=[file_message(entry, entry.path.rpartition("/")[2]) for entry in entries])


@router.get("/mlflow-artifacts/artifacts/{artifact_path:path}")
@router.head("/mlflow-artifacts/artifacts/{artifact_path:path}", include_in_schema=False)
def download(artifact_path: str, request: Request, tracking: TrackingOf, artifacts: RunArtifactsOf) -> Response:
    place = locate(tracking, checked_path(artifact_path))
    return artifact_response(artifacts, place.owner, place.path, request)


@router.put("/mlflow-artifacts/artifacts/{artifact_path:path}")
async def upload(artifact_path: str, request: Request, tracking: TrackingOf, artifacts: RunArtifactsOf) -> Response:
    place = await run_in_threadpool(locate, tracking, checked_path(artifact_path))
    place.check_writable()
    uploaded = await receive(request, artifacts, place.owner, place.path)
    response = answer()
    response.headers[HEADER] = uploaded.sha256
    return response


@router.delete("/mlflow-artifacts/artifacts/{artifact_path:path}")
def delete(artifact_path: str, tracking: TrackingOf, artifacts: RunArtifactsOf) -> Response:
    place = locate(tracking, checked_path(artifact_path))
    place.check_writable()
    artifacts.delete(place.owner, place.path)
    return answer()


@router.post("/mlflow/upload-artifact")
async def upload_small(
    request: Request,
    tracking: TrackingOf,
    artifacts: RunArtifactsOf,
    run_uuid: str = "",
    path: str = "",
) -> Response:
    """How the web UI uploads: the body is the file, of at most `MAX_SMALL` bytes."""
    for name, given in (("run_uuid", run_uuid), ("path", path)):
        if not given:
            raise invalid(f"Request must specify {name}.")
    checked_path(path)
    # A body of a length that nobody told would be read to its end: browsers tell it.
    length = int(request.headers.get("content-length", 0))
    if length > MAX_SMALL:
        raise invalid("Artifact size is too large. Max size is 10MB.")
    if not length:
        raise invalid("Request must specify data.")
    run = await run_in_threadpool(tracking.runs.get, run_uuid)
    check_run_active(run.id, run.lifecycle_stage)
    await receive(request, artifacts, run.id, path)
    return answer()


async def receive(request: Request, artifacts: RunArtifacts, owner: str, path: str) -> Uploaded:
    """Stream the body into the store: one that breaks off, or is not what its checksums say, leaves nothing."""
    length = request.headers.get("content-length")
    size = int(length) if length is not None else None
    try:
        return await artifacts.receive(owner, path, request.stream(), promised(request.headers), size)
    except ClientDisconnect:
        raise invalid("The upload broke off, and nothing was stored: send it again") from None


@dataclass(frozen=True)
class Place:
    """A path below the files of a run or a logged model ("" for all of them)."""

    owner: str
    path: str
    is_model: bool
    lifecycle_stage: str

    def check_writable(self) -> None:
        """Raises a 4xx where the owner is deleted."""
        if self.is_model and self.lifecycle_stage != "active":
            raise no_model(self.owner)
        check_run_active(self.owner, self.lifecycle_stage)


def locate(tracking: Tracking, proxied: str) -> Place:
    """What `{experiment}/{run}/artifacts[/PATH]` or `{experiment}/models/{model}/artifacts[/PATH]` names."""
    match proxied.split("/"):
        case [experiment, "models", owner, "artifacts", *path]:
            is_model = True
        case [experiment, owner, "artifacts", *path]:
            is_model = False
        case _:
            raise not_found(
                "There is no such artifact location: it must be EXPERIMENT_ID/RUN_ID/artifacts/PATH or "
                "EXPERIMENT_ID/models/MODEL_ID/artifacts/PATH"
            )
    found = tracking.logged_models.get(owner, allow_deleted=True) if is_model else tracking.runs.get(owner)
    if str(found.experiment_id) != experiment:
        raise no_model(owner) if is_model else not_found(f"Run with id={owner} not found in experiment {experiment}")
    return Place(found.id, "/".join(path), is_model, found.lifecycle_stage)


def artifact_response(artifacts: RunArtifacts, owner: str, path: str, request: Request) -> Response:
    return file_response(artifacts.open(owner, path), path.rpartition("/")[2], request)


def file_message(entry: Entry, path: str) -> dict[str, str | int | bool]:
    message: dict[str, str | int | bool] = {"path": path, "is_dir": entry.is_dir}
    return message if entry.size is None else {**message, "file_size": entry.size}
