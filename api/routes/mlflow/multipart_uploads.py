"""MLflow's uploads in parts and downloads that go past this server, over URLs signed for the S3 server.

Only where there is an S3 server; a folder answers 501, as in MLflow. What comes in so is hashed once its parts are one
object, before the client is told that it is stored, and operation goes out is hashed before its URL is given away (row X7).
A client does this by itself where `server-info` says that it may, which is where `storage.public_endpoint` is set: else
nobody knows whether clients reach the S3 server at all.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated

from pydantic import Field

from api.artifacts.locations import ArtifactLocation
from api.artifacts.run_artifacts import checked_path
from api.auth.permissions import Permission
from api.dependencies import ArtifactLocationsOf, CallerOf, SignedTransfersOf, VerifiedFilesOf
from api.responses import TypedResponse
from api.routing import Router
from api.schemas.mlflow import responses
from api.schemas.mlflow.messages import mlflow_response
from api.schemas.mlflow.requests import Message, Required
from recipes.storage.artifact_store import Store
from recipes.storage.signed_urls import MAX_PARTS, SignedTransfers, UploadedPart, UploadRefused, multipart_etag
from resources.errors import ErrorCode, HanzoError, invalid, not_found

router = Router("/mlflow-artifacts", tag="mlflow")

SEPARATOR = re.compile(r"[/\\]")
"""Of a path on the client's system, whichever that is."""
PartNumber = Annotated[int, Field(ge=1, le=MAX_PARTS)]


class OfFile(Message):
    """`path` is the client's own name of the file: its last part is operation it will be called."""

    path: Required

    def below(self, folder: str) -> str:
        name = SEPARATOR.split(self.path)[-1]
        return checked_path(f"{checked_path(folder)}/{name}")


class CreateUpload(OfFile):
    num_parts: PartNumber = 1


class PartBody(Message):
    part_number: PartNumber
    etag: str = ""


class CompleteUpload(OfFile):
    upload_id: Required
    parts: Annotated[tuple[PartBody, ...], Field(min_length=1, max_length=MAX_PARTS)]


class AbortUpload(OfFile):
    upload_id: Required


@router.post("/mpu/create/{artifact_path:path}", Permission.EXPERIMENTS_WRITE, allows_jobs=True)
def create(
    artifact_path: str, body: CreateUpload, locations: ArtifactLocationsOf, transfers: SignedTransfersOf, caller: CallerOf
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
    locations: ArtifactLocationsOf,
    files: VerifiedFilesOf,
    transfers: SignedTransfersOf,
    caller: CallerOf,
) -> TypedResponse[responses.NothingAnswer]:
    location = locations.locate(body.below(artifact_path), caller.organization)
    check_supported(transfers, "Multipart upload")
    location.check_writable()
    location.artifacts.check_free(location.owner, location.path)
    uri, parts = location_uri(location), [UploadedPart(part.part_number, part.etag) for part in body.parts]
    try:
        files.adopt(uri, lambda: transfers.complete(uri, body.upload_id, parts))
    except UploadRefused:
        raise invalid("The parts are not those that were uploaded, and nothing was stored: upload them again") from None
    except FileNotFoundError:
        # Perhaps the client lost the answer to its first request, which may be at work still.
        if not is_assembled_from(files.store, uri, parts):
            message = "No such upload is on its way there: it was completed or aborted, or is of another file"
            raise not_found(message) from None
        files.open(uri, location.owner)
    return mlflow_response()


@router.post("/mpu/abort/{artifact_path:path}", Permission.EXPERIMENTS_WRITE, allows_jobs=True)
def abort(
    artifact_path: str, body: AbortUpload, locations: ArtifactLocationsOf, transfers: SignedTransfersOf, caller: CallerOf
) -> TypedResponse[responses.NothingAnswer]:
    location = locations.locate(body.below(artifact_path), caller.organization)
    check_supported(transfers, "Multipart upload")
    with suppress(FileNotFoundError):  # nothing is on its way, which is operation was asked for
        transfers.abort(location_uri(location), body.upload_id)
    return mlflow_response()


@router.get("/presigned/{artifact_path:path}", Permission.EXPERIMENTS_READ)
def download_url(
    artifact_path: str, locations: ArtifactLocationsOf, transfers: SignedTransfersOf, caller: CallerOf
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
    """Whether operation lies at `uri` was made of these parts. Always False where ETags are no MD5 (SSE-KMS)."""
    try:
        return store.open(uri).version.strip('"') == multipart_etag(parts)
    except FileNotFoundError:
        return False
