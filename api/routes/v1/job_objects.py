"""Objects of a program on a cluster: pods use signed addresses, without a store key.

Signed addresses serve bytes that are not read before a manifest lists them. Everything that makes them visible or changes
existing objects (manifests, results, exit documents, deletions, copies, completed uploads) goes through this server, because
an issued address cannot be revoked: the server refuses attempts older than the newest one.

If the store is a folder, an address is one of this server (`GET` and `PUT content`), relative to that of the objects.
"""

import hashlib
from collections.abc import AsyncIterator
from typing import Annotated
from urllib.parse import urlencode

from fastapi import Depends, Header, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from api.artifacts.object_response import object_response
from api.auth.program_tokens import ProgramGrantDep
from api.dependencies import DatabaseDep, ProgramScopesDep, SignedTransfersDep, StoreDep
from api.errors import error_response
from api.json_bodies import TypedResponse, json_response
from api.routing import PROGRAM, Audit, Router
from api.schemas.v1 import job_objects as schemas
from recipes.storage.artifact_store import Store
from recipes.storage.buckets import ObjectReplaced
from recipes.storage.signed_urls import SignedRequest
from resources.errors import ErrorCode, HanzoError, invalid, not_found
from resources.object_store.program_scope import normalize_uri
from resources.object_store.program_writes import ProgramWrites

router = Router("/v1/jobs/{job_id}/programs/{program}/objects", tag="v1")

READ_SECONDS = 3600
WRITE_SECONDS = 900
MAX_COMMIT_BYTES = 64 << 20
"""For an object written through this server to S3: a manifest of 100,000 files has 20 MB."""

Attempt = Annotated[
    int,
    Header(
        alias="Hanzo-ML-Attempt", ge=0, le=999_999, description="attempt of the caller; writes of older attempts are refused"
    ),
]


async def program_writes(
    grant: ProgramGrantDep, store: StoreDep, database: DatabaseDep, attempt: Attempt = 0
) -> ProgramWrites:
    return ProgramWrites(store, database, grant, attempt)


ProgramWritesDep = Annotated[ProgramWrites, Depends(program_writes)]


@router.post("/addresses", PROGRAM, audit=Audit.NOTED)
def sign(
    body: schemas.AddressesBody,
    grant: ProgramGrantDep,
    store: StoreDep,
    transfers: SignedTransfersDep,
    scopes: ProgramScopesDep,
    program: ProgramWritesDep,
) -> TypedResponse[schemas.SignedAddresses]:
    """Return addresses to read and write whole objects, without checking their existence."""
    reads = [normalize_uri(store, uri) for uri in body.reads]
    for uri in reads:
        scopes.check_read(grant.job, uri)
    wanted = [(program.check(new.uri), new) for new in body.writes]
    writes: list[schemas.SignedAddress | None] = []
    for uri, new in wanted:
        if program.scope.is_committed(uri):
            writes.append(None)
        elif transfers.is_available:
            writes.append(signed(transfers.put_request(uri, new.sha256, WRITE_SECONDS)))
        else:
            writes.append(content_address(uri, new.sha256))
    return json_response(schemas.SignedAddresses(reads=[read_address(store, uri) for uri in reads], writes=writes))


@router.post("/head", PROGRAM, read_only=True)
def head(
    body: schemas.HeadBody, grant: ProgramGrantDep, store: StoreDep, scopes: ProgramScopesDep
) -> TypedResponse[schemas.ObjectHeads]:
    """Return the current object at each URI, with an address to read it."""
    uris = [normalize_uri(store, uri) for uri in body.uris]
    for uri in uris:
        scopes.check_read(grant.job, uri)
    found: list[schemas.StoredObjectHead | None] = []
    for uri in uris:
        try:
            known = store.head(uri)
        except FileNotFoundError:
            found.append(None)
            continue
        found.append(
            schemas.StoredObjectHead(
                uri=uri,
                size=known.size,
                version=known.version,
                modified_ms=known.modified_ms,
                address=read_address(store, uri),
            )
        )
    return json_response(schemas.ObjectHeads(objects=found))


@router.post("/list", PROGRAM, read_only=True)
def list_objects(
    body: schemas.ListBody, grant: ProgramGrantDep, store: StoreDep, scopes: ProgramScopesDep
) -> TypedResponse[schemas.ObjectListing]:
    """List objects below a URI."""
    uri = normalize_uri(store, body.uri)
    scopes.check_read(grant.job, uri)
    entries, folders = (store.entries(uri), []) if body.recursive else store.list_folder(uri)
    objects = [schemas.ListedObject(uri=entry.uri, size=entry.size) for entry in entries]
    return json_response(schemas.ObjectListing(objects=objects, folders=list(folders)))


@router.post("/delete", PROGRAM, audit=Audit.COUNTED)
def delete(body: schemas.DeleteBody, store: StoreDep, program: ProgramWritesDep) -> TypedResponse[schemas.WrittenObjects]:
    """Delete existing objects in the order of the request."""
    uris = [program.check(uri) for uri in body.uris]
    with program.hold():
        for uri in uris:
            store.remove(uri)
    return json_response(schemas.WrittenObjects(uris=uris))


@router.post("/copy", PROGRAM, audit=Audit.COUNTED)
def copy(
    body: schemas.CopyBody,
    grant: ProgramGrantDep,
    store: StoreDep,
    scopes: ProgramScopesDep,
    program: ProgramWritesDep,
) -> TypedResponse[schemas.WrittenObjects]:
    """Copy an object within the store, without transferring its bytes."""
    source = normalize_uri(store, body.source)
    scopes.check_read(grant.job, source)
    uri = program.check(body.uri)
    with program.hold():
        try:
            store.copy(source, uri)
        except FileNotFoundError:
            raise missing_object(source) from None
    return json_response(schemas.WrittenObjects(uris=[uri]))


@router.put("/content", PROGRAM, audit=Audit.COUNTED, streams_body=True)
async def put_content(
    request: Request,
    store: StoreDep,
    program: ProgramWritesDep,
    uri: Annotated[str, Query(min_length=1, max_length=4096)],
    sha256: Annotated[str, Query(pattern=r"^[0-9a-f]{64}$", description="SHA-256 of the body, which is verified")],
) -> TypedResponse[schemas.WrittenObjects]:
    """Check and commit an object, unless a newer attempt has begun."""
    uri = await run_in_threadpool(program.check, uri)
    size = int(request.headers.get("content-length") or -1)
    if size < 0 or (size > MAX_COMMIT_BYTES and store.local_path(uri) is None):
        raise invalid(f"{uri}: send a body of at most {MAX_COMMIT_BYTES} bytes with a Content-Length, or use uploads")
    if size > MAX_COMMIT_BYTES:
        await store.put_stream(uri, verified(request.stream(), sha256, uri), size)
    else:
        data = b"".join([chunk async for chunk in verified(request.stream(), sha256, uri)])
        await run_in_threadpool(program.commit, uri, data)
    return json_response(schemas.WrittenObjects(uris=[uri]))


@router.get("/content", PROGRAM, produces="application/octet-stream", ranges=True)
def get_content(
    request: Request,
    grant: ProgramGrantDep,
    store: StoreDep,
    scopes: ProgramScopesDep,
    uri: Annotated[str, Query(min_length=1, max_length=4096)],
) -> Response:
    """Send an object or a range of it; with If-Match, only that version."""
    uri = normalize_uri(store, uri)
    scopes.check_read(grant.job, uri)
    try:
        return object_response(store.open(uri), request)
    except ObjectReplaced:
        return error_response(ErrorCode.RESOURCE_CONFLICT, f"{uri} was replaced while it was read: read it again", 412)
    except FileNotFoundError:
        raise missing_object(uri) from None


async def verified(body: AsyncIterator[bytes], sha256: str, uri: str) -> AsyncIterator[bytes]:
    """Yield the body; raise a 409 at its end if its SHA-256 differs."""
    digest = hashlib.sha256()
    async for chunk in body:
        digest.update(chunk)
        yield chunk
    if digest.hexdigest() != sha256:
        raise HanzoError(ErrorCode.CHECKSUM_MISMATCH, f"{uri}: the body has SHA-256 {digest.hexdigest()}, not {sha256}")


def read_address(store: Store, uri: str) -> schemas.SignedAddress:
    url = store.signed_url(uri, READ_SECONDS)
    return content_address(uri) if url is None else schemas.SignedAddress(url=url, headers={}, expires_in=READ_SECONDS)


def content_address(uri: str, sha256: str | None = None) -> schemas.SignedAddress:
    """Return an address of this server, relative to that of the program's objects."""
    query = urlencode({"uri": uri, **({"sha256": sha256} if sha256 else {})})
    return schemas.SignedAddress(url=f"content?{query}", headers={}, expires_in=READ_SECONDS)


def signed(request: SignedRequest) -> schemas.SignedAddress:
    return schemas.SignedAddress(url=request.url, headers=dict(request.headers), expires_in=WRITE_SECONDS)


def missing_object(uri: str) -> HanzoError:
    return not_found(f"there is no object at {uri}")
