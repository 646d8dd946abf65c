"""Store files and read them back verified by checksums (SHA-256, MD5)."""

import base64
import binascii
import hashlib
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool

from recipes.storage.artifact_store import MANIFEST_FILE, BrokenArtifact, Store
from recipes.storage.buckets import StoreUnavailable
from recipes.storage.locations import parse_chunk_hash
from recipes.storage.manifest import Artifact, Manifest
from recipes.storage.object_transfer import StoredObject
from resources.errors import ErrorCode, HanzoError, invalid
from resources.metadata.artifacts.file_hashes import UNKNOWN_HASH, FileHashes, RecordedHash

# Checksums that a client sends with an upload: `Content-MD5` (RFC 1864) and `X-Checksum-Sha256` (hex).

SHA256_HEADER = "X-Checksum-Sha256"


@dataclass(frozen=True)
class ExpectedChecksums:
    """Checksums that the bytes must have; None if the client sent none."""

    sha256: str | None = None
    md5: bytes | None = None


class RunningChecksums:
    """Checksums of streamed bytes. MD5 only if the client sent one: it halves the speed."""

    def __init__(self, promised: ExpectedChecksums) -> None:
        self._promised = promised
        self._sha256 = hashlib.sha256()
        self._md5: Any = hashlib.md5(usedforsecurity=False) if promised.md5 is not None else None
        self.size = 0

    def update(self, data: bytes) -> None:
        self._sha256.update(data)
        if self._md5 is not None:
            self._md5.update(data)
        self.size += len(data)

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()

    def check(self) -> None:
        """Raise a 400 if the bytes differ from the expected checksums."""
        if self._promised.sha256 not in (None, self.sha256):
            raise checksum_mismatch(SHA256_HEADER)
        if self._md5 is not None and self._md5.digest() != self._promised.md5:
            raise checksum_mismatch("Content-MD5")


def checksum_mismatch(header: str) -> Exception:
    return invalid(f"The received bytes do not match {header}, and nothing was stored: send them again")


def expected_checksums(headers: Mapping[str, str]) -> ExpectedChecksums:
    """Parse the checksum headers; raise a 400 for a malformed one."""
    sha256 = headers.get(SHA256_HEADER.lower())
    if sha256 is not None and not re.fullmatch(r"[0-9a-fA-F]{64}", sha256):
        raise invalid(f"{SHA256_HEADER} must be a SHA-256 of 64 hexadecimal digits")
    md5 = headers.get("content-md5")
    try:
        digest = None if md5 is None else base64.b64decode(md5, validate=True)
    except (binascii.Error, ValueError):
        digest = b""
    if digest is not None and len(digest) != 16:
        raise invalid("Content-MD5 must be the base64 of an MD5's 16 bytes")
    return ExpectedChecksums(sha256.lower() if sha256 else None, digest)


# Verified files: hashed on upload, and again before they are sent.
#
# Keeps the object store and the hash records consistent. File names belong to `run_artifacts`, HTTP to
# `artifacts.file_response`.

CHUNK_BYTES = 1 << 20
MAX_BYTES_IN_MEMORY = 4 << 20
"""A file up to this size is read once and kept in memory until it is sent; a larger one is read twice."""
MAX_READ_ATTEMPTS = 5


@dataclass(frozen=True)
class UploadedFile:
    uri: str
    sha256: str
    size: int


@dataclass(frozen=True)
class VerifiedFile:
    """A file whose bytes were just hashed and match the record."""

    stored: StoredObject
    sha256: str
    content: bytes | None

    @property
    def size(self) -> int:
        return self.stored.size

    def chunks(self, start: int, stop: int) -> Iterator[bytes]:
        if self.content is not None:
            return iter([self.content[start:stop]])
        return self.stored.chunks(start, stop)


class VerifiedFiles:
    """Uploaded files of an object store, and artifacts that the asset graph published there.

    Args:
        find_organization: returns the owner of the file at a URI, for the audit log.
    """

    def __init__(self, store: Store, records: FileHashes, find_organization: Callable[[str], str]) -> None:
        self.store = store
        self._records = records
        self._find_organization = find_organization

    async def receive(
        self, uri: str, body: AsyncIterator[bytes], promised: ExpectedChecksums, declared_size: int | None = None
    ) -> UploadedFile:
        """Store a body completely or not at all, replacing an existing file.

        Raises:
            HanzoError: 400 if the bytes differ from the expected checksums.
        """
        running = RunningChecksums(promised)
        arrivals = []

        async def hashed() -> AsyncIterator[bytes]:
            async for piece in in_chunks(body):
                await run_in_threadpool(running.update, piece)
                yield piece
            running.check()
            # The store makes the object visible when this generator ends: its hash must be recorded before.
            arrivals.append(await run_in_threadpool(self._records.begin_upload, uri, running.sha256, running.size))

        await self.store.put_stream(uri, hashed(), declared_size)
        await run_in_threadpool(self._records.stored, arrivals[0])
        return UploadedFile(uri, running.sha256, running.size)

    def adopt(self, uri: str, complete: Callable[[], None]) -> UploadedFile:
        """Hash and record a file that a client uploaded directly.

        Raises:
            Exception: from `complete`, which makes the file visible at `uri`. The previous file there is unchanged.
        """
        arrival = self._records.begin_upload(uri, UNKNOWN_HASH, 0)
        try:
            complete()
        except StoreUnavailable:  # it may have completed nevertheless
            raise
        except Exception:
            self._records.forget([arrival.id])
            raise
        stored = self.store.open(uri)
        sha256 = stored.sha256()
        self._records.finish_unknown_upload(arrival, sha256, stored.size)
        return UploadedFile(uri, sha256, stored.size)

    def open(self, uri: str, owner: str, artifact: Artifact | None = None) -> VerifiedFile:
        """Open the file at `uri` after hashing all of it.

        A corrupt file thus gives an error response instead of a broken connection, even for a range request.

        Args:
            owner: owner of the file, as the key of the event `artifact.broken`.
            artifact: what the asset graph published there, where the caller knows it.

        Raises:
            FileNotFoundError: there is no such file.
            HanzoError: 409 if its bytes are not the recorded ones.
        """
        for _ in range(MAX_READ_ATTEMPTS):
            stored = self.store.open(uri)
            try:
                content = b"".join(stored.chunks()) if stored.size <= MAX_BYTES_IN_MEMORY else None
                found = stored.sha256() if content is None else hashlib.sha256(content).hexdigest()
            except FileNotFoundError:  # replaced by another upload
                continue
            # Read the records after the bytes: if the object was replaced meanwhile, its old records no longer exist.
            rows = self._records.at(uri)
            expected = {row.sha256 for row in rows} if rows else self._published_hashes(uri, owner, artifact)
            if not expected or found in expected:
                self._note_repair(uri, rows)
                return VerifiedFile(stored, found, content)
            if UNKNOWN_HASH in expected:
                self._records.fix_unknown_hash(uri, found, stored.size)
                return VerifiedFile(stored, found, content)
            if self.store.open(uri).version == stored.version:
                self._records.report_broken(uri, owner, self._find_organization(uri), sorted(expected), found)
                raise corrupted_artifact(uri)
        raise replaced_while_read()

    def delete(self, uri: str) -> None:
        """Delete the file at `uri`, or everything below it."""
        rows = self._records.list_stored_rows([uri, *self.store.list(uri)])
        self.store.delete(uri)
        self._records.forget(rows)

    def _note_repair(self, uri: str, rows: list[RecordedHash]) -> None:
        if any(row.found_sha256 for row in rows):
            self._records.mark_repaired(uri)

    def _published_hashes(self, uri: str, owner: str, artifact: Artifact | None) -> set[str]:
        """Return the hashes a published file may have: from a chunk's name or a manifest.

        The manifest is that of `artifact`, else of the nearest artifact above the file.
        """
        if named := parse_chunk_hash(uri):
            return {named}
        if artifact is not None:
            return self._hashes_in_manifest(uri, artifact.uri, self._proved_manifest(artifact, owner)) | (
                {artifact.digest} if uri == f"{artifact.uri}/{MANIFEST_FILE}" else set()
            )
        folder = uri.rpartition("/")[0]
        while folder.count("/") > 3:  # s3://BUCKET/KIND/NAME is the shallowest artifact
            where = f"{folder}/{MANIFEST_FILE}"
            # An uploaded manifest proves nothing.
            if where != uri and not self._records.at(where):
                with suppress(FileNotFoundError, ValidationError):
                    manifest = Manifest.model_validate_json(self.store.get_bytes(where))
                    if hashes := self._hashes_in_manifest(uri, folder, manifest):
                        return hashes
            folder = folder.rpartition("/")[0]
        return set()

    def _proved_manifest(self, artifact: Artifact, owner: str) -> Manifest:
        try:
            return self.store.manifest(artifact)
        except BrokenArtifact:
            where = f"{artifact.uri}/{MANIFEST_FILE}"
            found = self._hash_or_nothing(where)
            self._records.report_broken(where, owner, self._find_organization(where), [artifact.digest], found)
            raise corrupted_artifact(where) from None

    def _hash_or_nothing(self, uri: str) -> str:
        try:
            return self.store.sha256(uri)
        except FileNotFoundError:
            return ""

    @staticmethod
    def _hashes_in_manifest(uri: str, folder: str, manifest: Manifest) -> set[str]:
        return {file.sha256 for file in manifest.files if f"{folder}/{file.object_path}" == uri}


def corrupted_artifact(uri: str) -> HanzoError:
    # Unlike MLflow's 500, on which its client would retry five times, and then hide the message.
    name = uri.rpartition("/")[2]
    return HanzoError(
        ErrorCode.DATA_LOSS,
        f"The artifact '{name}' is corrupt: its bytes do not have the recorded SHA-256. Restore it or upload it again",
    )


def replaced_while_read() -> HanzoError:
    return HanzoError(ErrorCode.TEMPORARILY_UNAVAILABLE, "The artifact was replaced while it was read: try again")


async def in_chunks(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Regroup bytes into chunks large enough to justify a thread call each."""
    waiting: list[bytes] = []
    length = 0
    async for chunk in body:
        waiting.append(chunk)
        length += len(chunk)
        if length >= CHUNK_BYTES:
            yield b"".join(waiting)
            waiting, length = [], 0
    if length:
        yield b"".join(waiting)
