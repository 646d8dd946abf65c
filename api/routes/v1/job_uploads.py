"""Multipart uploads of a program on a cluster: parts go to signed addresses.

This server begins and completes them.
"""

from contextlib import suppress

from api.dependencies import SignedTransfersDep, StoreDep
from api.json_bodies import TypedResponse, json_response
from api.routes.v1.job_objects import WRITE_SECONDS, ProgramWritesDep, signed
from api.routing import PROGRAM, Audit, Router
from api.schemas.v1 import job_objects as schemas
from recipes.storage.artifact_store import Store
from recipes.storage.signed_urls import SignedTransfers, UploadedPart, UploadRefused, multipart_etag
from resources.errors import conflict, invalid, not_found
from resources.object_store.program_scope import normalize_uri
from resources.object_store.program_writes import ProgramWrites

router = Router("/v1/jobs/{job_id}/programs/{program}/objects/uploads", tag="v1")


@router.post("", PROGRAM, audit=Audit.NOTED)
def begin_upload(
    body: schemas.UploadBody, transfers: SignedTransfersDep, program: ProgramWritesDep
) -> TypedResponse[schemas.ObjectUpload]:
    """Begin a multipart upload. The object stays invisible until the upload is complete."""
    uri = program.check(body.uri)
    if program.scope.is_committed(uri) or not transfers.is_available:
        return json_response(schemas.ObjectUpload(upload_id=None))
    return json_response(schemas.ObjectUpload(upload_id=transfers.begin_with_checksums(uri)))


@router.post("/parts", PROGRAM, audit=Audit.NOTED)
def sign_parts(
    body: schemas.PartsBody, transfers: SignedTransfersDep, program: ProgramWritesDep
) -> TypedResponse[schemas.PartAddresses]:
    """Return addresses to upload parts."""
    uri = check_upload(body.uri, program, transfers)
    requests = (transfers.part_request(uri, body.upload_id, part.number, part.sha256, WRITE_SECONDS) for part in body.parts)
    return json_response(schemas.PartAddresses(parts=[signed(request) for request in requests]))


@router.post("/complete", PROGRAM, audit=Audit.COUNTED)
def complete_upload(
    body: schemas.CompleteBody, store: StoreDep, transfers: SignedTransfersDep, program: ProgramWritesDep
) -> TypedResponse[schemas.WrittenObjects]:
    """Assemble the parts into the object; repeating a call after a lost response succeeds."""
    uri = check_upload(body.uri, program, transfers)
    parts = [UploadedPart(part.number, part.etag, part.sha256) for part in body.parts]
    with program.hold():
        try:
            transfers.complete(uri, body.upload_id, parts)
        except UploadRefused:
            raise invalid(f"{uri}: the parts differ from the uploaded ones: upload them again") from None
        except FileNotFoundError:
            if not is_assembled_from(store, uri, parts):
                raise not_found(f"{uri}: this upload was aborted, or is of another object: begin it again") from None
    return json_response(schemas.WrittenObjects(uris=[uri]))


@router.post("/abort", PROGRAM, audit=Audit.NOTED)
def abort_upload(
    body: schemas.AbortBody, store: StoreDep, transfers: SignedTransfersDep, program: ProgramWritesDep
) -> TypedResponse[schemas.WrittenObjects]:
    """Delete the uploaded parts, also for an older attempt."""
    uri = normalize_uri(store, body.uri)
    program.scope.check_write(uri, program.attempt)
    if transfers.is_available:
        with suppress(FileNotFoundError):
            transfers.abort(uri, body.upload_id)
    return json_response(schemas.WrittenObjects(uris=[uri]))


def check_upload(uri: str, program: ProgramWrites, transfers: SignedTransfers) -> str:
    """Return the normalized URI of an upload; raise HanzoError as `ProgramWrites.check` does."""
    uri = program.check(uri)
    if program.scope.is_committed(uri) or not transfers.is_available:
        raise conflict(f"{uri} is not uploaded in parts: send it with PUT content")
    return uri


def is_assembled_from(store: Store, uri: str, parts: list[UploadedPart]) -> bool:
    """Return whether an earlier call already assembled these parts; False for ETags without MD5."""
    try:
        return store.open(uri).version.strip('"') == multipart_etag(parts)
    except FileNotFoundError:
        return False
