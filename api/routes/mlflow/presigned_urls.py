"""MLflow's presigned URLs of a run's or a logged model's files. Its clients ask for them where files lie in a bucket of the
client's own choice, and MLflow signs those with the server's rights. This server has rights to its own store alone, whose
files go through the artifact proxy (`multipart_uploads`): so every request is checked, and answered as MLflow answers a
proxied one.
"""

from fastapi import Response

from api.artifacts.run_artifacts import checked_path
from api.auth.permissions import Permission
from api.dependencies import TrackingOf
from api.routing import Router
from api.schemas.mlflow.requests import Message, Required
from resources.errors import ErrorCode, HanzoError, invalid
from resources.metadata.artifacts.locations import PROXY_SCHEME, is_proxied

MAX_SECONDS = 604_800
"""Seven days: no S3 server takes a signature for longer."""

router = Router("/mlflow/artifacts", tag="mlflow")


class UploadUrl(Message):
    path: Required
    run_id: str = ""
    model_id: str = ""
    expiration: int = 900


class DownloadUrl(Message):
    run_id: Required
    path: Required
    expiration: int = 300


@router.post("/presigned-upload-url", Permission.EXPERIMENTS_WRITE, status_code=501)
def presigned_upload(body: UploadUrl, tracking: TrackingOf) -> Response:
    if bool(body.run_id) == bool(body.model_id):
        raise invalid("Exactly one of run_id and model_id must be provided.")
    checked_path(body.path)
    found = tracking.runs.get(body.run_id) if body.run_id else tracking.logged_models.get(body.model_id)
    raise unsupported("upload", found.artifact_uri, "proxied artifact storage", "direct cloud storage artifact URI")


@router.post("/presigned-download-url", Permission.EXPERIMENTS_READ, read_only=True, status_code=501)
def presigned_download(body: DownloadUrl, tracking: TrackingOf) -> Response:
    checked_path(body.path)
    if not 1 <= body.expiration <= MAX_SECONDS:
        raise invalid(f"expiration must be between 1 and {MAX_SECONDS} seconds (got {body.expiration}).")
    run = tracking.runs.get(body.run_id)
    where, needed = "runs with proxied artifact storage", "run with a direct cloud storage artifact URI"
    raise unsupported("download", run.artifact_uri, where, needed)


def unsupported(operation: str, uri: str, where: str, needed: str) -> HanzoError:
    if is_proxied(uri):
        return invalid(
            f"Presigned {operation} is not supported for {where} (artifact URI scheme: {PROXY_SCHEME}). "
            f"This endpoint requires a {needed}."
        )
    return HanzoError(
        ErrorCode.NOT_IMPLEMENTED, f"Presigned {operation} is not supported for the current artifact repository"
    )
