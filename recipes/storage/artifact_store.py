"""Read and write artifacts in the object store; the manifest is written last.

An artifact is a set of files and a manifest with their SHA-256. The meaning of its files is unknown here; transfers are in
`recipes.storage.object_store`, locations in `recipes.storage.locations`.
"""

import hashlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path, PurePosixPath

from pydantic import JsonValue, ValidationError

from recipes.storage.checksums import (
    MANIFEST_FILE,
    describe_files,
    find_difference,
    find_file_corruption,
    has_only_listed_files,
    hash_file,
    write_atomically,
)
from recipes.storage.line_selection import LineMask, bitmap_uri, origin_uri, select_lines, unpack_bitmap
from recipes.storage.locations import BrokenArtifact, chunk_uri
from recipes.storage.manifest import Artifact, Chunk, FileRecord, LineSelection, Manifest
from recipes.storage.object_store import ObjectStore
from recipes.storage.object_transfer import PREFETCH_RANGES, prefetch

PREPARED_CHUNKS = 200
"""Number of chunks, 1 MiB each on average, whose signed addresses are requested together."""

__all__ = ["MANIFEST_FILE", "BrokenArtifact", "Store", "describe_files", "find_file_corruption", "hash_file"]


class Store(ObjectStore):
    """Store of artifacts.

    S3 credentials are taken from `variables`, or from the AWS variables of the environment.
    """

    def delete(self, uri: str) -> None:
        """Delete the object at `uri`, or everything below it."""
        for object_uri in self.list_deletions(uri):
            self.remove(object_uri)

    def list_deletions(self, uri: str) -> list[str]:
        """List the object at `uri`, or all below it, in deletion order.

        The manifest goes first: a half-deleted artifact has none.
        """
        return sorted(self.list(uri) or [uri], key=lambda name: not name.endswith("/" + MANIFEST_FILE))

    def publish(
        self,
        folder: Path,
        uri: str,
        kind: str,
        *,
        inputs: Mapping[str, str] | None = None,
        facts: Mapping[str, JsonValue] | None = None,
    ) -> Artifact:
        """Upload a folder and its manifest, which is written last.

        A partially uploaded artifact has no manifest.
        """
        manifest = Manifest(kind=kind, files=describe_files(folder), inputs=dict(inputs or {}), facts=dict(facts or {}))
        return self.publish_described(folder, uri, manifest)

    def publish_described(self, folder: Path, uri: str, manifest: Manifest) -> Artifact:
        """Like `publish`, for a folder whose manifest is known already."""
        self.put_files(folder, uri, manifest)
        return self.put_manifest(uri, manifest)

    def put_files(self, folder: Path, uri: str, manifest: Manifest) -> None:
        """Upload the files in a manifest.

        Until the manifest is written they are no artifact.
        """

        def put(file: FileRecord) -> None:
            self.put_file(f"{uri.rstrip('/')}/{file.object_path}", folder / file.path)

        for _ in prefetch(put, manifest.files, self.concurrent_files):
            pass

    def put_manifest(self, uri: str, manifest: Manifest) -> Artifact:
        """Commit an artifact whose files are in the store already."""
        uri = uri.rstrip("/")
        written = manifest.to_bytes()
        self.put_bytes(f"{uri}/{MANIFEST_FILE}", written)
        digest = hashlib.sha256(written).hexdigest()
        return Artifact(kind=manifest.kind, uri=uri, digest=digest, size_bytes=manifest.size_bytes)

    def find(self, uri: str) -> Artifact | None:
        """Return the artifact whose manifest is at `uri`, or None."""
        try:
            manifest = Manifest.model_validate_json(self.get_bytes(f"{uri.rstrip('/')}/{MANIFEST_FILE}"))
        except (FileNotFoundError, ValidationError):
            return None
        return Artifact(kind=manifest.kind, uri=uri.rstrip("/"), digest=manifest.digest, size_bytes=manifest.size_bytes)

    def manifest(self, artifact: Artifact) -> Manifest:
        """Read and verify an artifact's manifest.

        Raises:
            BrokenArtifact: it is missing, or its bytes do not have the artifact's digest.
        """
        location = f"{artifact.uri}/{MANIFEST_FILE}"
        try:
            raw = self.get_bytes(location)
        except FileNotFoundError:
            raise BrokenArtifact(f"{location} is missing") from None
        if hashlib.sha256(raw).hexdigest() != artifact.digest:
            raise BrokenArtifact(f"{location} has SHA-256 {hashlib.sha256(raw).hexdigest()}, recorded is {artifact.digest}")
        try:
            return Manifest.model_validate_json(raw)
        except ValidationError as error:
            raise BrokenArtifact(f"{location} is not a manifest: {error.error_count()} problems") from None

    def pieces(self, artifact_uri: str, file: FileRecord) -> Iterator[bytes]:
        """Yield the bytes of a file, from an object, chunks or selected lines.

        Each chunk is verified first.

        Raises:
            FileNotFoundError: its object, or a chunk, is missing.
            BrokenArtifact: a chunk has other bytes than its hash, or the source of selected lines is missing. A file without
                chunks is not verified here.
        """
        if file.selection is not None:
            yield from self._selected_pieces(artifact_uri, file, file.selection)
        elif not file.chunks:
            yield from self.open(f"{artifact_uri}/{file.object_path}").chunks()
        for chunk in self._prepare_chunks(artifact_uri, file.chunks):
            yield self.chunk(artifact_uri, chunk)

    def prefetch_pieces(self, artifact_uri: str, file: FileRecord) -> Iterator[bytes]:
        """Like `pieces`, with read-ahead for consumers that read everything at once."""
        if file.selection is not None:
            return self.pieces(artifact_uri, file)
        if file.chunks:
            chunks = self._prepare_chunks(artifact_uri, file.chunks)
            return prefetch(partial(self.chunk, artifact_uri), chunks, PREFETCH_RANGES)
        return self.open(f"{artifact_uri}/{file.object_path}").prefetch_ranges()

    def _prepare_chunks(self, artifact_uri: str, chunks: Sequence[Chunk]) -> Iterator[Chunk]:
        """Yield chunks, requesting the addresses of each batch in advance."""
        for start in range(0, len(chunks), PREPARED_CHUNKS):
            batch = chunks[start : start + PREPARED_CHUNKS]
            self.prepare_reads([chunk_uri(artifact_uri, chunk.sha256) for chunk in batch])
            yield from batch

    def chunk(self, artifact_uri: str, chunk: Chunk) -> bytes:
        """Read and verify a chunk of a file.

        Raises:
            FileNotFoundError: it is missing.
            BrokenArtifact: it has other bytes than its hash.
        """
        location = chunk_uri(artifact_uri, chunk.sha256)
        # In a folder, query the size, which is cheap: an empty file has no range, and reading one would look like an outage.
        stored = self.open(location) if self.local_path(location) else self.open_known_size(location, chunk.size)
        data = b"".join(stored.chunks())
        if (found := hashlib.sha256(data).hexdigest()) != chunk.sha256:
            raise BrokenArtifact(f"{location}, a chunk of a file of {artifact_uri}, has SHA-256 {found}")
        return data

    def read_line_mask(self, artifact_uri: str, file: FileRecord, selection: LineSelection) -> LineMask:
        """Read which lines a file consists of. Raises FileNotFoundError or BrokenArtifact."""
        location = bitmap_uri(artifact_uri, file.path)
        bitmap = self.get_bytes(location)
        if (found := hashlib.sha256(bitmap).hexdigest()) != selection.sha256:
            raise BrokenArtifact(f"{location} has SHA-256 {found}, recorded is {selection.sha256}")
        return unpack_bitmap(bitmap, selection.records)

    def origin(self, artifact_uri: str, selection: LineSelection) -> tuple[str, Manifest]:
        """Return URI and manifest of the artifact whose lines a file consists of. Raises BrokenArtifact."""
        location = origin_uri(artifact_uri)
        try:
            uri = self.get_bytes(location).decode()
            return uri, self.manifest(Artifact(kind="", uri=uri, digest=selection.of, size_bytes=0))
        except (BrokenArtifact, FileNotFoundError, UnicodeDecodeError) as error:
            raise BrokenArtifact(f"{location} does not lead to artifact {selection.of}: {error}") from None

    def _selected_pieces(self, artifact_uri: str, file: FileRecord, selection: LineSelection) -> Iterator[bytes]:
        try:
            uri, manifest = self.origin(artifact_uri, selection)
            source = next(one for one in manifest.files if one.path == selection.path)
            yield from select_lines(self.pieces(uri, source), self.read_line_mask(artifact_uri, file, selection))
        except (BrokenArtifact, FileNotFoundError) as error:
            raise BrokenArtifact(f"{artifact_uri}/{file.path} consists of lines of another file: {error}") from None

    def fetch(self, artifact: Artifact, cache: Path, only: Collection[str] | None = None) -> Path:
        """Return the artifact as a verified local folder.

        It is used in place if the store is a folder that holds the artifact alone, else assembled in `cache`. Cached files
        are reused if their bytes match the manifest. Callers read all files in the returned folder, so it must hold listed
        files only: a file outside the manifest would be trained on without being part of the lineage.

        Args:
            only: names of the files to fetch; None for all.

        Raises:
            BrokenArtifact: a file is missing or its SHA-256 differs from the manifest's.
        """
        manifest = self.manifest(artifact)
        local = self._local_folder_in_place(artifact, manifest, only)
        folder = local or cache / artifact.digest
        selected = [file for file in manifest.files if only is None or file.path in only]
        seen = [read_file_stamp(folder / file.path) for file in selected]
        # In parallel: hashing the files of a large model one by one, at about 2 GB/s, takes longer than loading them.
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as hashing:
            problems = list(hashing.map(partial(find_file_corruption, folder), selected))

        def mend(found: tuple[FileRecord, tuple[int, int, int] | None, str | None]) -> None:
            file, before, problem = found
            if problem and local is None:
                # Another process may have fetched it by now; an unchanged file is not hashed again.
                if read_file_stamp(folder / file.path) == before or find_file_corruption(folder, file):
                    self._download(artifact.uri, file, folder / PurePosixPath(file.path))
            elif problem:
                self.require_mounted_bucket(artifact.uri)
                raise BrokenArtifact(f"{artifact.uri}/{problem}")

        for _ in prefetch(mend, zip(selected, seen, problems, strict=True), self.concurrent_files):
            pass
        return folder

    def locate_fetched(self, artifact: Artifact, cache: Path) -> Path:
        """Return the folder that another process of this machine has just fetched, without hashing."""
        return self._local_folder_in_place(artifact, self.manifest(artifact)) or cache / artifact.digest

    def _local_folder_in_place(
        self, artifact: Artifact, manifest: Manifest, only: Collection[str] | None = None
    ) -> Path | None:
        """Return the folder that holds exactly this artifact, or None if it must be assembled."""
        if any(file.chunks or file.selection or file.object for file in manifest.files):
            return None
        local = self.local_path(artifact.uri)
        return local if local and (only is not None or has_only_listed_files(local, manifest)) else None

    def _download(self, artifact_uri: str, file: FileRecord, target: Path) -> None:
        """Download a file, hashing it on the way.

        `target` only ever holds what the manifest says.
        """
        digest, size = hashlib.sha256(), 0
        try:
            with write_atomically(target) as out:
                for piece in self.prefetch_pieces(artifact_uri, file):
                    out.write(piece)
                    digest.update(piece)
                    size += len(piece)
                if problem := find_difference(file, size, digest.hexdigest()):
                    raise BrokenArtifact(f"{artifact_uri}/{problem}")
        except FileNotFoundError as error:
            raise BrokenArtifact(f"{artifact_uri}/{file.path} is missing: {error}") from None


def read_file_stamp(path: Path) -> tuple[int, int, int] | None:
    """Return values that change when a file is replaced or written.

    None if it does not exist.
    """
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
