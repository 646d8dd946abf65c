"""Uploads in parts of a program on a cluster: each part to a signed address, begun and completed by this server."""

from contextlib import suppress

from api.auth.program_tokens import ProgramGrantDep
from api.dependencies import DatabaseDep, SignedTransfersDep, StoreDep
from api.json_bodies import TypedResponse, json_response
from api.routes.v1.job_objects import WRITE_SECONDS, Attempt, signed
from api.routing import PROGRAM, Audit, Router
from api.schemas.v1 import job_objects as schemas
from recipes.storage.artifact_store import Store
from recipes.storage.signed_urls import SignedTransfers, UploadedPart, UploadRefused, multipart_etag
from resources.errors import conflict, invalid, not_found
from resources.jobs.program_tokens import ProgramGrant
from resources.metadata.database import Database
from resources.object_store.attempt_fence import hold_attempt
from resources.object_store.program_scope import normalize_uri, program_scope
from resources.object_store.program_writes import check_write

router = Router("/v1/jobs/{job_id}/programs/{program}/objects/uploads", tag="v1")


@router.post("", PROGRAM, audit=Audit.NOTED)
def begin_upload(
    body: schemas.UploadBody,
    grant: ProgramGrantDep,
    store: StoreDep,
    transfers: SignedTransfersDep,
    database: DatabaseDep,
    attempt: Attempt = 0,
) -> TypedResponse[schemas.ObjectUpload]:
    """Begin an upload in parts. Nobody sees the object before the upload is complete."""
    uri, scope = normalize_uri(store, body.uri), program_scope(grant.job)
    check_write(scope, store, database, grant, uri, attempt)
    if scope.is_committed(uri) or not transfers.is_available:
        return json_response(schemas.ObjectUpload(upload_id=None))
    return json_response(schemas.ObjectUpload(upload_id=transfers.begin_with_checksums(uri)))


@router.post("/parts", PROGRAM, audit=Audit.NOTED)
def sign_parts(
    body: schemas.PartsBody,
    grant: ProgramGrantDep,
    store: StoreDep,
    transfers: SignedTransfersDep,
    database: DatabaseDep,
    attempt: Attempt = 0,
) -> TypedResponse[schemas.PartAddresses]:
    """Addresses to upload parts."""
    uri = check_upload(body.uri, grant, store, transfers, database, attempt)
    requests = (transfers.part_request(uri, body.upload_id, part.number, part.sha256, WRITE_SECONDS) for part in body.parts)
    return json_response(schemas.PartAddresses(parts=[signed(request) for request in requests]))


@router.post("/complete", PROGRAM, audit=Audit.COUNTED)
def complete_upload(
    body: schemas.CompleteBody,
    grant: ProgramGrantDep,
    store: StoreDep,
    transfers: SignedTransfersDep,
    database: DatabaseDep,
    attempt: Attempt = 0,
) -> TypedResponse[schemas.WrittenObjects]:
    """Make one object of the parts. Repeating a call whose answer was lost succeeds."""
    uri = check_upload(body.uri, grant, store, transfers, database, attempt)
    parts = [UploadedPart(part.number, part.etag, part.sha256) for part in body.parts]
    with hold_attempt(database, grant, attempt):
        try:
            transfers.complete(uri, body.upload_id, parts)
        except UploadRefused:
            raise invalid(f"{uri}: the parts are not those that were uploaded: upload them again") from None
        except FileNotFoundError:
            if not is_assembled_from(store, uri, parts):
                raise not_found(f"{uri}: this upload was aborted, or is of another object: begin it again") from None
    return json_response(schemas.WrittenObjects(uris=[uri]))


@router.post("/abort", PROGRAM, audit=Audit.NOTED)
def abort_upload(
    body: schemas.AbortBody, grant: ProgramGrantDep, store: StoreDep, transfers: SignedTransfersDep, attempt: Attempt = 0
) -> TypedResponse[schemas.WrittenObjects]:
    """Drop the parts that arrived."""
    uri = normalize_uri(store, body.uri)
    program_scope(grant.job).check_write(uri, attempt)
    if transfers.is_available:
        with suppress(FileNotFoundError):
            transfers.abort(uri, body.upload_id)
    return json_response(schemas.WrittenObjects(uris=[uri]))


def check_upload(
    uri: str, grant: ProgramGrant, store: Store, transfers: SignedTransfers, database: Database, attempt: int
) -> str:
    """The URI of an upload in its one form. Raises HanzoError as `check_write` does."""
    uri, scope = normalize_uri(store, uri), program_scope(grant.job)
    check_write(scope, store, database, grant, uri, attempt)
    if scope.is_committed(uri) or not transfers.is_available:
        raise conflict(f"{uri} is not uploaded in parts: send it whole with PUT content")
    return uri


def is_assembled_from(store: Store, uri: str, parts: list[UploadedPart]) -> bool:
    """Whether the object was made of these parts: the answer to an earlier call was lost. False where ETags are no MD5."""
    try:
        return store.open(uri).version.strip('"') == multipart_etag(parts)
    except FileNotFoundError:
        return False
