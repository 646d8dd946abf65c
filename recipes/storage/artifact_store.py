"""The object store, as programs and the control plane alike see it: artifacts in and out, manifest last.

An artifact is files and a manifest with their SHA-256. What its files mean is not known here; how bytes travel is
`recipes.storage.object_store`, where they lie `recipes.storage.locations`.
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
"""Chunks of a file, of 1 MiB on average, whose addresses are asked for at once where reads need one."""

__all__ = ["MANIFEST_FILE", "BrokenArtifact", "Store", "describe_files", "find_file_corruption", "hash_file"]


class Store(ObjectStore):
    """Reads and writes artifacts. S3 credentials are `variables`, or the AWS variables of the environment."""

    def delete(self, uri: str) -> None:
        """Delete the object at `uri`, or everything below it."""
        for object_uri in self.list_deletions(uri):
            self.remove(object_uri)

    def list_deletions(self, uri: str) -> list[str]:
        """The object at `uri`, or all below it, in the order of a deletion: a half-deleted artifact has no manifest."""
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
        """Upload a folder and, last, its manifest: an artifact that is half there has no manifest (row I15)."""
        manifest = Manifest(kind=kind, files=describe_files(folder), inputs=dict(inputs or {}), facts=dict(facts or {}))
        return self.publish_described(folder, uri, manifest)

    def publish_described(self, folder: Path, uri: str, manifest: Manifest) -> Artifact:
        """`publish` for a folder whose manifest is known already."""
        self.put_files(folder, uri, manifest)
        return self.put_manifest(uri, manifest)

    def put_files(self, folder: Path, uri: str, manifest: Manifest) -> None:
        """Upload what a manifest lists; without one they are no artifact."""

        def put(file: FileRecord) -> None:
            self.put_file(f"{uri.rstrip('/')}/{file.object_path}", folder / file.path)

        for _ in prefetch(put, manifest.files, self.concurrent_files):
            pass

    def put_manifest(self, uri: str, manifest: Manifest) -> Artifact:
        """Make an artifact of files that are in the store already."""
        uri = uri.rstrip("/")
        written = manifest.to_bytes()
        self.put_bytes(f"{uri}/{MANIFEST_FILE}", written)
        digest = hashlib.sha256(written).hexdigest()
        return Artifact(kind=manifest.kind, uri=uri, digest=digest, size_bytes=manifest.size_bytes)

    def find(self, uri: str) -> Artifact | None:
        """The artifact whose manifest lies at `uri`, if one does."""
        try:
            manifest = Manifest.model_validate_json(self.get_bytes(f"{uri.rstrip('/')}/{MANIFEST_FILE}"))
        except (FileNotFoundError, ValidationError):
            return None
        return Artifact(kind=manifest.kind, uri=uri.rstrip("/"), digest=manifest.digest, size_bytes=manifest.size_bytes)

    def manifest(self, artifact: Artifact) -> Manifest:
        """The manifest at the artifact's place.

        Raises:
            BrokenArtifact: it is not there, or its bytes do not have the artifact's digest.
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
            raise BrokenArtifact(f"{location} is no manifest: {error.error_count()} problems") from None

    def pieces(self, artifact_uri: str, file: FileRecord) -> Iterator[bytes]:
        """The bytes of a file, wherever they lie; each chunk is verified before it is given away.

        Raises:
            FileNotFoundError: its object, or a chunk, is missing.
            BrokenArtifact: a chunk has other bytes than its name says, or of what a file was chosen of something is missing.
                A file without chunks is not verified here.
        """
        if file.selection is not None:
            yield from self._selected_pieces(artifact_uri, file, file.selection)
        elif not file.chunks:
            yield from self.open(f"{artifact_uri}/{file.object_path}").chunks()
        for chunk in self._prepare_chunks(artifact_uri, file.chunks):
            yield self.chunk(artifact_uri, chunk)

    def prefetch_pieces(self, artifact_uri: str, file: FileRecord) -> Iterator[bytes]:
        """`pieces` for whoever wants all of them soon: some are fetched at the same time."""
        if file.selection is not None:
            return self.pieces(artifact_uri, file)
        if file.chunks:
            chunks = self._prepare_chunks(artifact_uri, file.chunks)
            return prefetch(partial(self.chunk, artifact_uri), chunks, PREFETCH_RANGES)
        return self.open(f"{artifact_uri}/{file.object_path}").prefetch_ranges()

    def _prepare_chunks(self, artifact_uri: str, chunks: Sequence[Chunk]) -> Iterator[Chunk]:
        """The chunks; before some are read, the store knows which."""
        for start in range(0, len(chunks), PREPARED_CHUNKS):
            batch = chunks[start : start + PREPARED_CHUNKS]
            self.prepare_reads([chunk_uri(artifact_uri, chunk.sha256) for chunk in batch])
            yield from batch

    def chunk(self, artifact_uri: str, chunk: Chunk) -> bytes:
        """A verified part of a file.

        Raises:
            FileNotFoundError: it is missing.
            BrokenArtifact: it has other bytes than its name says.
        """
        location = chunk_uri(artifact_uri, chunk.sha256)
        # A folder is asked for the size, which is cheap: an empty file has no range, and reading one looks like an outage.
        stored = self.open(location) if self.local_path(location) else self.open_known_size(location, chunk.size)
        data = b"".join(stored.chunks())
        if (found := hashlib.sha256(data).hexdigest()) != chunk.sha256:
            raise BrokenArtifact(f"{location}, a chunk of a file of {artifact_uri}, has SHA-256 {found}")
        return data

    def read_line_mask(self, artifact_uri: str, file: FileRecord, selection: LineSelection) -> LineMask:
        """Which lines a file consists of. Raises FileNotFoundError or BrokenArtifact."""
        location = bitmap_uri(artifact_uri, file.path)
        bitmap = self.get_bytes(location)
        if (found := hashlib.sha256(bitmap).hexdigest()) != selection.sha256:
            raise BrokenArtifact(f"{location} has SHA-256 {found}, recorded is {selection.sha256}")
        return unpack_bitmap(bitmap, selection.records)

    def origin(self, artifact_uri: str, selection: LineSelection) -> tuple[str, Manifest]:
        """Where the artifact lies of whose lines a file consists, and its manifest. Raises BrokenArtifact."""
        location = origin_uri(artifact_uri)
        try:
            uri = self.get_bytes(location).decode()
            return uri, self.manifest(Artifact(kind="", uri=uri, digest=selection.of, size_bytes=0))
        except (BrokenArtifact, FileNotFoundError, UnicodeDecodeError) as error:
            raise BrokenArtifact(f"what {location} names is not {selection.of}: {error}") from None

    def _selected_pieces(self, artifact_uri: str, file: FileRecord, selection: LineSelection) -> Iterator[bytes]:
        try:
            uri, manifest = self.origin(artifact_uri, selection)
            source = next(one for one in manifest.files if one.path == selection.path)
            yield from select_lines(self.pieces(uri, source), self.read_line_mask(artifact_uri, file, selection))
        except (BrokenArtifact, FileNotFoundError) as error:
            raise BrokenArtifact(f"{artifact_uri}/{file.path} consists of lines of another file: {error}") from None

    def fetch(self, artifact: Artifact, cache: Path, only: Collection[str] | None = None) -> Path:
        """The artifact as a verified local folder: in place where it lies in one alone, else put together in `cache`.

        What the cache has already is not fetched again, unless its bytes are not the manifest's. Whoever is given a folder
        reads what lies in it: a file that no manifest lists would be trained on, and the proof would not know of it.

        Args:
            only: names of the files that are wanted; none: all.

        Raises:
            BrokenArtifact: a file is missing or its SHA-256 is not the manifest's (row X7).
        """
        manifest = self.manifest(artifact)
        local = self._local_folder_in_place(artifact, manifest, only)
        folder = local or cache / artifact.digest
        selected = [file for file in manifest.files if only is None or file.path in only]
        seen = [read_file_stamp(folder / file.path) for file in selected]
        # One after the other, the files of a large model take longer to hash than to load: about 2 GB a second.
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as hashing:
            problems = list(hashing.map(partial(find_file_corruption, folder), selected))

        def mend(found: tuple[FileRecord, tuple[int, int, int] | None, str | None]) -> None:
            file, before, problem = found
            if problem and local is None:
                # Another may have fetched it by now; as it was, it is not hashed again.
                if read_file_stamp(folder / file.path) == before or find_file_corruption(folder, file):
                    self._download(artifact.uri, file, folder / PurePosixPath(file.path))
            elif problem:
                self.require_mounted_bucket(artifact.uri)
                raise BrokenArtifact(f"{artifact.uri}/{problem}")

        for _ in prefetch(mend, zip(selected, seen, problems, strict=True), self.concurrent_files):
            pass
        return folder

    def locate_fetched(self, artifact: Artifact, cache: Path) -> Path:
        """Where `fetch` has just put all of an artifact, in another process of this machine; it is not hashed once more."""
        return self._local_folder_in_place(artifact, self.manifest(artifact)) or cache / artifact.digest

    def _local_folder_in_place(
        self, artifact: Artifact, manifest: Manifest, only: Collection[str] | None = None
    ) -> Path | None:
        """The folder that has the artifact alone, as it is; none where it has to be put together."""
        if any(file.chunks or file.selection or file.object for file in manifest.files):
            return None
        local = self.local_path(artifact.uri)
        return local if local and (only is not None or has_only_listed_files(local, manifest)) else None

    def _download(self, artifact_uri: str, file: FileRecord, target: Path) -> None:
        """Bring a file, hashed on its way: nothing comes to `target` that is not as the manifest says."""
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
    """What is another number once a file was replaced or written to; None where there is none."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
