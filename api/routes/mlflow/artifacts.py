"""Artifacts over MLflow's API: listing the files of a run, and the proxy for `mlflow-artifacts:/...`.

`api.artifacts.locations` defines the paths of the proxy.
"""

from fastapi import Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from api.artifacts.file_response import file_response
from api.artifacts.locations import ArtifactLocation
from api.artifacts.run_artifacts import Entry, OwnedArtifacts, checked_folder, checked_path
from api.artifacts.verified_files import SHA256_HEADER, UploadedFile, expected_checksums
from api.auth.permissions import Permission
from api.dependencies import ArtifactLocationsDep, CallerDep, DatabaseDep, RunArtifactsDep, StoreDep, TrackingDep
from api.json_bodies import TypedResponse
from api.routes.mlflow.model_versions import is_version_path, version_entries
from api.routing import Router
from api.schemas.mlflow import responses
from api.schemas.mlflow.messages import RunIdParameter, mlflow_response
from resources.errors import HanzoError, invalid
from resources.metadata.artifacts.locations import check_proxied
from resources.metadata.tracking.run_data import check_run_active

MAX_WEB_UPLOAD_BYTES = 10 * 1024 * 1024

router = Router(tag="mlflow")


@router.get("/mlflow/artifacts/list", Permission.EXPERIMENTS_READ, allows_jobs=True)
def list_artifacts(
    tracking: TrackingDep,
    artifacts: RunArtifactsDep,
    run_id: RunIdParameter,
    path: str = "",
) -> TypedResponse[responses.FilesAnswer]:
    folder = checked_folder(path)  # before any look-up, as in MLflow
    run = tracking.runs.get(run_id)
    check_proxied(run.artifact_uri)
    files = [file_message(entry) for entry in artifacts.entries(run.id, folder)]
    return mlflow_response(root_uri=run.artifact_uri, files=files)


@router.get("/mlflow/artifacts/get", Permission.EXPERIMENTS_READ, produces="*/*", ranges=True, head=True)
def file_of_run(
    path: str, request: Request, tracking: TrackingDep, artifacts: RunArtifactsDep, run_id: RunIdParameter
) -> Response:
    """Download a file of a run under FastTrackML's path; MLflow's is /get-artifact."""
    checked_path(path)
    run = tracking.runs.get(run_id)
    check_proxied(run.artifact_uri)
    return artifact_response(artifacts, run.id, path, request)


@router.get("/mlflow-artifacts/artifacts", Permission.EXPERIMENTS_READ, allows_jobs=True)
def list_proxied(
    locations: ArtifactLocationsDep,
    database: DatabaseDep,
    store: StoreDep,
    caller: CallerDep,
    path: str = "",
) -> TypedResponse[responses.ProxiedFilesAnswer]:
    """List entries with names relative to `path`, as the proxy's client expects."""
    folder = checked_folder(path)
    if is_version_path(folder):
        found = version_entries(database, store, folder, caller.organization)
    else:
        found = locations.entries(folder, caller.organization)
    return mlflow_response(files=[file_message(entry) for entry in found])


@router.get(
    "/mlflow-artifacts/artifacts/{artifact_path:path}",
    Permission.EXPERIMENTS_READ,
    allows_jobs=True,
    produces="*/*",
    ranges=True,
    head=True,
)
def download(artifact_path: str, request: Request, locations: ArtifactLocationsDep, caller: CallerDep) -> Response:
    return location_response(locations.locate(checked_path(artifact_path), caller.organization), request)


@router.put(
    "/mlflow-artifacts/artifacts/{artifact_path:path}", Permission.EXPERIMENTS_WRITE, allows_jobs=True, streams_body=True
)
async def upload(
    artifact_path: str, request: Request, locations: ArtifactLocationsDep, caller: CallerDep
) -> TypedResponse[responses.NothingAnswer]:
    location = await run_in_threadpool(locations.locate, checked_path(artifact_path), caller.organization)
    location.check_writable()
    uploaded = await store_body(request, location.artifacts, location.owner, location.path)
    response = mlflow_response()
    response.headers[SHA256_HEADER] = uploaded.sha256
    return response


@router.delete("/mlflow-artifacts/artifacts/{artifact_path:path}", Permission.EXPERIMENTS_DELETE)
def delete(artifact_path: str, locations: ArtifactLocationsDep, caller: CallerDep) -> TypedResponse[responses.NothingAnswer]:
    """Delete a file, a folder, or all files of a run.

    For the last, MLflow's client names the run's folder with a trailing slash.
    """
    named = artifact_path.removesuffix("/") if artifact_path.endswith("/artifacts/") else artifact_path
    location = locations.locate(checked_path(named), caller.organization)
    location.check_writable()
    location.artifacts.delete(location.owner, location.path)
    return mlflow_response()


@router.post("/mlflow/upload-artifact", Permission.EXPERIMENTS_WRITE, streams_body=True)
async def upload_small(
    request: Request,
    tracking: TrackingDep,
    artifacts: RunArtifactsDep,
    run_uuid: str = "",
    path: str = "",
) -> TypedResponse[responses.NothingAnswer]:
    """Upload from the web UI: the body is the file, of at most 10 MB."""
    for name, given in (("run_uuid", run_uuid), ("path", path)):
        if not given:
            raise invalid(f"Request must specify {name}.")
    checked_path(path)
    # A body without a length would be read to its end; browsers always send the length.
    length = int(request.headers.get("content-length", 0))
    if length > MAX_WEB_UPLOAD_BYTES:
        raise invalid("Artifact size is too large. Max size is 10MB.")
    if not length:
        raise invalid("Request must specify data.")
    run = await run_in_threadpool(tracking.runs.get, run_uuid)
    check_run_active(run.id, run.lifecycle_stage)
    check_proxied(run.artifact_uri)
    await store_body(request, artifacts, run.id, path)
    return mlflow_response()


async def store_body(request: Request, artifacts: OwnedArtifacts, owner: str, path: str) -> UploadedFile:
    """Stream the body into the store; an interrupted or corrupt upload leaves nothing."""
    length = request.headers.get("content-length")
    size = int(length) if length is not None else None
    try:
        return await artifacts.receive(owner, path, request.stream(), expected_checksums(request.headers), size)
    except ClientDisconnect:
        raise upload_interrupted() from None


def upload_interrupted() -> HanzoError:
    return invalid("The upload was interrupted, and nothing was stored: send it again")


def artifact_response(artifacts: OwnedArtifacts, owner: str, path: str, request: Request) -> Response:
    return file_response(artifacts.open(owner, path), path.rpartition("/")[2], request)


def location_response(location: ArtifactLocation, request: Request) -> Response:
    return artifact_response(location.artifacts, location.owner, location.path, request)


def file_message(entry: Entry) -> dict[str, str | int | bool]:
    message: dict[str, str | int | bool] = {"path": entry.path, "is_dir": entry.is_dir}
    return message if entry.size is None else {**message, "file_size": entry.size}
