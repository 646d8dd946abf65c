"""Signed links to download a dataset version without sign-in.

On S3 they are presigned URLs of the S3 server, under its public name (`storage.public_endpoint`) if there is one. If the
store is a folder, this server answers them. It also serves files of a split that are selected lines of their version, of
which the store has no copy: storing one for each download would duplicate the version, and require cleanup. They are
streamed a chunk at a time, and an interrupted download can be resumed. A file may have several parts: concatenated in
order, they are the file, verified by its SHA-256.
"""

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, Literal, Self

from fastapi import Query, Request, Response
from fastapi.responses import StreamingResponse

from api.artifacts.file_response import SAFE_HEADERS, parse_range, range_bounds
from api.artifacts.signed_links import SignedLink, link_key
from api.artifacts.verified_files import VerifiedFile, corrupted_artifact
from api.auth.permissions import Permission
from api.dependencies import CallerDep, DatabaseDep, SettingsDep, StoreDep, VerifiedFilesDep
from api.json_bodies import TypedResponse
from api.routing import PUBLIC, Audit, Router
from api.schemas.v1.datasets import DatasetDownload, DatasetFile, find_version
from recipes.storage.artifact_store import BrokenArtifact, Store
from recipes.storage.locations import chunk_uri
from recipes.storage.manifest import Artifact, FileRecord
from resources.errors import not_found
from resources.lineage.edges import find_artifact, parent_digests
from resources.metadata.database import Database
from resources.metadata.datasets import DatasetVersion
from resources.settings.settings import Settings

log = logging.getLogger(__name__)

router = Router("/v1/datasets", tag="v1", strict=False)
link_router = Router("/v1/dataset-files", tag="v1", strict=False)

Content = Literal["source", "records", "train", "validation", "test", "rejected"]
JOIN = "concatenate the parts of each file in order, and compare its SHA-256"


@router.get("/{dataset_id}/download", Permission.DATASETS_READ, audit=Audit.EACH, allows_jobs=True)
def download(
    dataset_id: str,
    request: Request,
    database: DatabaseDep,
    store: StoreDep,
    settings: SettingsDep,
    caller: CallerDep,
    content: Annotated[Content, Query(description="files as uploaded, as JSON lines, of a split, or rejects")] = "source",
    seconds: Annotated[int, Query(ge=1, le=7 * 24 * 3600, description="how long the links are valid")] = 3600,
) -> TypedResponse[DatasetDownload]:
    """Return links to all files of a version; `url` for a single part."""
    version = find_version(database, dataset_id)
    artifact = requested_artifact(database, store, version, content)
    expires_at = int(time.time()) + seconds
    public = public_store(settings)

    def address(uri: str, file: FileRecord) -> str:
        if file.selection is None and (signed := public.signed_url(uri, seconds)):
            return signed
        link = SignedLink(caller.organization, uri, expires_at)
        return f"{request.base_url}v1/dataset-files?{link.query(link_key(settings.home))}"

    files = store.manifest(artifact).files
    parts = [part for file in files[:2] for part in file_json(artifact, file, address)["parts"]]
    only = parts[0]["url"] if len(parts) == 1 else None
    head = {"dataset": version.reference, "url": only, "expires_at": expires_at * 1000, "join": JOIN}
    text = listing(head, (file_json(artifact, file, address) for file in files))
    return TypedResponse(text)


@link_router.get("", PUBLIC, produces="application/octet-stream", ranges=True)
def linked(
    request: Request,
    organization: str,
    uri: str,
    expires_at: int,
    signature: str,
    store: StoreDep,
    verified: VerifiedFilesDep,
    settings: SettingsDep,
) -> Response:
    """Send the stored bytes of a signed link, or a range of them.

    The signature is the permission: no sign-in is required.
    """
    SignedLink(organization, uri, expires_at).check(signature, link_key(settings.home), time.time())
    try:
        file = SelectedLines.at(store, uri) or verified.open(uri, organization)
        return part_response(file, request.headers.get("range", ""))
    except BrokenArtifact as problem:
        log.warning("the file of a link is corrupt: %s", problem)
        raise corrupted_artifact(uri) from None
    except FileNotFoundError:
        raise not_found("The file of this link no longer exists: ask for a new link") from None


def part_response(file: "SelectedLines | VerifiedFile", asked: str) -> Response:
    """Send a file or a range; a missing file fails before the response begins."""
    headers = {**SAFE_HEADERS, "Accept-Ranges": "bytes", "Content-Disposition": "attachment"}
    part = parse_range(asked)
    start, stop = range_bounds(part, file.size) if part else (0, file.size)
    if part and start >= stop:
        return Response(status_code=416, headers={**headers, "Content-Range": f"bytes */{file.size}"})
    if part:
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{file.size}"
    headers["Content-Length"] = str(stop - start)
    pieces = iter(file.chunks(start, stop))
    known = chain((next(pieces, b""),), pieces)
    return StreamingResponse(known, 206 if part else 200, media_type="application/octet-stream", headers=headers)


@dataclass(frozen=True)
class SelectedLines:
    """A file that consists of selected lines of another."""

    store: Store
    artifact_uri: str
    file: FileRecord

    @classmethod
    def at(cls, store: Store, uri: str) -> Self | None:
        """Return the file at a URI; None without one."""
        folder, _, path = uri.rpartition("/")
        if (artifact := store.find(folder)) is None:
            return None
        found = (file for file in store.manifest(artifact).files if file.path == path and file.selection)
        return next((cls(store, folder, file) for file in found), None)

    @property
    def size(self) -> int:
        return self.file.size

    def chunks(self, start: int, stop: int) -> Iterator[bytes]:
        """Yield bytes as `VerifiedFile.chunks`; reads from the start, as line lengths are unknown."""
        done = 0
        for piece in self.store.pieces(self.artifact_uri, self.file):
            if wanted := piece[max(start - done, 0) : stop - done]:
                yield wanted
            done += len(piece)
            if done >= stop:
                return


def public_store(settings: Settings) -> Store:
    """Return the object store as clients reach it: a signature covers the host name."""
    storage = settings.storage
    root = storage.public_endpoint if storage.endpoint and storage.public_endpoint else settings.store.root
    return Store(settings.store.model_copy(update={"root": root}), storage.variables)


def requested_artifact(database: Database, store: Store, version: DatasetVersion, content: Content) -> Artifact:
    """Return the requested artifact of a version, or raise a 404."""
    if content == "source":
        return source_artifact(database, version)
    if content == "records":
        return version.artifact
    if content == "rejected":
        if (rejected := store.find(f"{version.storage_path}rejected")) is None:
            raise not_found(f"dataset {version.reference} was not prepared, so it has no rejected records")
        return rejected
    return version.split(content)


def source_artifact(database: Database, version: DatasetVersion) -> Artifact:
    """Return the artifact of the files as they were uploaded."""
    with database.read() as connection:
        digest = parent_digests(connection, version.artifact.digest).get("source")
        found = find_artifact(connection, digest) if digest else None
    if found is None:
        raise not_found(f"dataset {version.reference} was not uploaded: ask for content=records (`--records`)")
    return found


def listing(head: Mapping[str, Any], files: Iterable[Mapping[str, Any]]) -> bytes:
    """Encode a JSON object with `files` as its last key, one file at a time.

    Dictionaries for all files at once would need more memory than anything else in a server.
    """
    written = b", ".join([json.dumps(file).encode() for file in files])
    return b'%b, "files": [%b]}' % (json.dumps(head).encode().removesuffix(b"}"), written)


def file_json(artifact: Artifact, file: FileRecord, address: Callable[[str, FileRecord], str]) -> DatasetFile:
    where = [(chunk_uri(artifact.uri, chunk.sha256), chunk.sha256, chunk.size) for chunk in file.chunks]
    parts = where or [(f"{artifact.uri}/{file.path}", file.sha256, file.size)]
    return {
        "path": file.path,
        "sha256": file.sha256,
        "size": file.size,
        "parts": [{"url": address(uri, file), "sha256": sha256, "size": size} for uri, sha256, size in parts],
    }
