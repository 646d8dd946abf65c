"""Multipart uploads and downloads over presigned URLs of the S3 server."""

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated

from fastapi import Response
from pydantic import Field

from api.artifacts.locations import ArtifactLocation
from api.artifacts.run_artifacts import checked_path
from api.auth.permissions import Permission
from api.dependencies import ArtifactLocationsDep, CallerDep, SignedTransfersDep, TrackingDep, VerifiedFilesDep
from api.json_bodies import TypedResponse
from api.routing import Router
from api.schemas.mlflow import responses
from api.schemas.mlflow.messages import Message, Required, mlflow_response
from recipes.storage.artifact_store import Store
from recipes.storage.signed_urls import MAX_PARTS, SignedTransfers, UploadedPart, UploadRefused, multipart_etag
from resources.errors import ErrorCode, HanzoError, invalid, not_found
from resources.metadata.artifacts.locations import PROXY_SCHEME, is_proxied

# MLflow's presigned URLs for files of a run or a logged model. Its clients request them for files in a bucket of the
# client's choice, and MLflow signs them with the server's rights. This server has rights to its own store only, whose files
# go through the artifact proxy (multipart uploads below): every request is checked, and answered as MLflow answers a proxied
# one.

MAX_SECONDS = 604_800
"""Seven days: S3 servers accept no longer signature."""

presigned_router = Router("/mlflow/artifacts", tag="mlflow")


class UploadUrl(Message):
    path: Required
    run_id: str = ""
    model_id: str = ""
    expiration: int = 900


class DownloadUrl(Message):
    run_id: Required
    path: Required
    expiration: int = 300


@presigned_router.post("/presigned-upload-url", Permission.EXPERIMENTS_WRITE, status_code=501)
def presigned_upload(body: UploadUrl, tracking: TrackingDep) -> Response:
    if bool(body.run_id) == bool(body.model_id):
        raise invalid("Exactly one of run_id and model_id must be provided.")
    checked_path(body.path)
    found = tracking.runs.get(body.run_id) if body.run_id else tracking.logged_models.get(body.model_id)
    raise presigned_unsupported(
        "upload", found.artifact_uri, "proxied artifact storage", "direct cloud storage artifact URI"
    )


@presigned_router.post("/presigned-download-url", Permission.EXPERIMENTS_READ, read_only=True, status_code=501)
def presigned_download(body: DownloadUrl, tracking: TrackingDep) -> Response:
    checked_path(body.path)
    if not 1 <= body.expiration <= MAX_SECONDS:
        raise invalid(f"expiration must be between 1 and {MAX_SECONDS} seconds (got {body.expiration}).")
    run = tracking.runs.get(body.run_id)
    where, needed = "runs with proxied artifact storage", "run with a direct cloud storage artifact URI"
    raise presigned_unsupported("download", run.artifact_uri, where, needed)


def presigned_unsupported(operation: str, uri: str, where: str, needed: str) -> HanzoError:
    if is_proxied(uri):
        return invalid(
            f"Presigned {operation} is not supported for {where} (artifact URI scheme: {PROXY_SCHEME}). "
            f"This endpoint requires a {needed}."
        )
    return HanzoError(
        ErrorCode.NOT_IMPLEMENTED, f"Presigned {operation} is not supported for the current artifact repository"
    )


# MLflow's multipart uploads, and downloads that bypass this server, over URLs signed for the S3 server.
#
# Only with an S3 server; a folder answers 501, as in MLflow. An upload is hashed once its parts are one object, before the
# client gets the response, and a download is hashed before its URL is handed out. Clients use these routes by themselves if
# `server-info` allows it, that is, if `storage.public_endpoint` is set: otherwise it is unknown whether clients can reach
# the S3 server.

router = Router("/mlflow-artifacts", tag="mlflow")

SEPARATOR = re.compile(r"[/\\]")
"""Separates a path on the client's system, of any kind."""
PartNumber = Annotated[int, Field(ge=1, le=MAX_PARTS)]


class FileBody(Message):
    """`path` is the client's local path; its last part becomes the file's name."""

    path: Required

    def below(self, folder: str) -> str:
        name = SEPARATOR.split(self.path)[-1]
        return checked_path(f"{checked_path(folder)}/{name}")


class CreateUpload(FileBody):
    num_parts: PartNumber = 1


class PartBody(Message):
    part_number: PartNumber
    etag: str = ""


class CompleteUpload(FileBody):
    upload_id: Required
    parts: Annotated[tuple[PartBody, ...], Field(min_length=1, max_length=MAX_PARTS)]


class AbortUpload(FileBody):
    upload_id: Required


@router.post("/mpu/create/{artifact_path:path}", Permission.EXPERIMENTS_WRITE, allows_jobs=True)
def create(
    artifact_path: str, body: CreateUpload, locations: ArtifactLocationsDep, transfers: SignedTransfersDep, caller: CallerDep
) -> TypedResponse[responses.UploadAnswer]:
    location = locations.locate(body.below(artifact_path), caller.organization)
    check_supported(transfers, "Multipart upload")
    location.check_writable()
    location.artifacts.check_free(location.owner, location.path)
    begun = transfers.begin(location_uri(location), body.num_parts)
    parts = [{"url": url, "part_number": number, "headers": {}} for number, url in enumerate(begun.part_urls, start=1)]
    return mlflow_response(upload_id=begun.id, credentials=parts)


@router.post("/mpu/complete/{artifact_path:path}", Permission.EXPERIMENTS_WRITE, allows_jobs=True)
def complete(
    artifact_path: str,
    body: CompleteUpload,
    locations: ArtifactLocationsDep,
    files: VerifiedFilesDep,
    transfers: SignedTransfersDep,
    caller: CallerDep,
) -> TypedResponse[responses.NothingAnswer]:
    location = locations.locate(body.below(artifact_path), caller.organization)
    check_supported(transfers, "Multipart upload")
    location.check_writable()
    location.artifacts.check_free(location.owner, location.path)
    uri, parts = location_uri(location), [UploadedPart(part.part_number, part.etag) for part in body.parts]
    try:
        files.adopt(uri, lambda: transfers.complete(uri, body.upload_id, parts))
    except UploadRefused:
        raise invalid("The parts differ from the uploaded ones, and nothing was stored: upload them again") from None
    except FileNotFoundError:
        # Possibly a retry after a lost response; the first request may still be running.
        if not is_assembled_from(files.store, uri, parts):
            message = "No such upload is in progress: it was completed or aborted, or is of another file"
            raise not_found(message) from None
        files.open(uri, location.owner)
    return mlflow_response()


@router.post("/mpu/abort/{artifact_path:path}", Permission.EXPERIMENTS_WRITE, allows_jobs=True)
def abort(
    artifact_path: str, body: AbortUpload, locations: ArtifactLocationsDep, transfers: SignedTransfersDep, caller: CallerDep
) -> TypedResponse[responses.NothingAnswer]:
    location = locations.locate(body.below(artifact_path), caller.organization)
    check_supported(transfers, "Multipart upload")
    with suppress(FileNotFoundError):  # no such upload: already the requested state
        transfers.abort(location_uri(location), body.upload_id)
    return mlflow_response()


@router.get("/presigned/{artifact_path:path}", Permission.EXPERIMENTS_READ)
def download_url(
    artifact_path: str, locations: ArtifactLocationsDep, transfers: SignedTransfersDep, caller: CallerDep
) -> TypedResponse[responses.DownloadUrlAnswer]:
    location = locations.locate(checked_path(artifact_path), caller.organization)
    check_supported(transfers, "Multipart download")
    file = location.artifacts.open(location.owner, location.path)
    return mlflow_response(url=transfers.download_url(file.stored.uri), headers={}, file_size=file.size)


def location_uri(location: ArtifactLocation) -> str:
    return location.artifacts.uri(location.owner, location.path)


def check_supported(transfers: SignedTransfers, operation: str) -> None:
    if not transfers.is_available:
        raise HanzoError(ErrorCode.NOT_IMPLEMENTED, f"{operation} is not supported for the current artifact repository")


def is_assembled_from(store: Store, uri: str, parts: Sequence[UploadedPart]) -> bool:
    """Return whether `uri` was assembled from these parts; False for ETags without MD5 (SSE-KMS)."""
    try:
        return store.open(uri).version.strip('"') == multipart_etag(parts)
    except FileNotFoundError:
        return False
