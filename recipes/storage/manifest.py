"""Artifact manifests, and the canonical JSON that their digests hash."""

import hashlib
import json
from typing import Any

from pydantic import Field, JsonValue, SerializerFunctionWrapHandler, model_serializer

from recipes.contracts.frozen_model import FrozenModel

# JSON of which two equal values have equal bytes, and so equal hashes.


def canonical_json(value: Any) -> bytes:
    """The one byte form of a JSON value, so that equal values have equal hashes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


# What an artifact is made of, and a pointer to it. What is read and written by it: `recipes.storage.artifact_store`.


class Chunk(FrozenModel):
    """A part of a file that is stored under its hash (`recipes.storage.locations`); `size` is in bytes."""

    sha256: str
    size: int


class LineSelection(FrozenModel):
    """Lines of a file of another artifact, in their order there (`recipes.storage.line_selection`).

    `of` is that artifact's digest and `path` the file. Where it lies stands elsewhere, as stores differ in that. `sha256` is
    of the bitmap that says which lines: one bit for each of the `records` lines of the file. `before` counts the records in
    the artifact's earlier files, `chosen` the bits that are set.
    """

    of: str
    path: str
    before: int
    records: int
    chosen: int
    sha256: str


class FileRecord(FrozenModel):
    """One file of an artifact: `path` is relative to the artifact, `sha256` is hexadecimal, `size` is in bytes.

    A file whose bytes lie in chunks names them in their order, and one that consists of lines of another says of which. One
    that lies at its path has neither, and no such key in JSON, so that digests of manifests are what they always were.

    Args:
        mode: permission bits, where they are not the default (`recipes.storage.folder_tree`).
        object: name of its object in the artifact, where that cannot be `path` (`recipes.storage.object_names`).
    """

    path: str
    sha256: str
    size: int
    chunks: tuple[Chunk, ...] = ()
    selection: LineSelection | None = None
    mode: int | None = Field(None, ge=0, le=0o777)
    object: str = ""

    @property
    def object_path(self) -> str:
        """Where its bytes lie in the artifact, unless they lie in chunks or in another one."""
        return self.object or self.path

    @model_serializer(mode="wrap")
    def omit_empty_fields(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        document: dict[str, Any] = serialize(self)
        return {key: value for key, value in document.items() if key in FILE_KEYS or value or (key, value) == ("mode", 0)}


FILE_KEYS = ("path", "sha256", "size")
"""Keys that every file has in JSON."""


class FolderRecord(FrozenModel):
    """A folder that no file's path tells of: it is empty, or has another mode than the default."""

    path: str
    mode: int | None = Field(None, ge=0, le=0o777)

    @model_serializer(mode="wrap")
    def omit_default_mode(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        document: dict[str, Any] = serialize(self)
        return {key: value for key, value in document.items() if value is not None}


class LinkRecord(FrozenModel):
    """A symbolic link; `target` is relative to the folder of the link, and stays inside the artifact."""

    path: str
    target: str


class Manifest(FrozenModel):
    """What an artifact is made of and what it was made from; its digest names the artifact.

    A manifest holds nothing that differs between two runs of the same work (no time, no host), so that equal work has an
    equal digest; a checkpoint's alone says how long its run had taken. `inputs` maps a role to the digest of another
    manifest: the chain `prove` walks. `folders` and `links` are no keys of the JSON where there are none.
    """

    kind: str
    files: tuple[FileRecord, ...]
    inputs: dict[str, str] = Field(default_factory=dict)
    facts: dict[str, JsonValue] = Field(default_factory=dict)
    folders: tuple[FolderRecord, ...] = Field((), exclude_if=lambda folders: not folders)
    links: tuple[LinkRecord, ...] = Field((), exclude_if=lambda links: not links)

    def to_bytes(self) -> bytes:
        """Canonical JSON. One file after the other: all of them as dictionaries take seven times as much memory as that."""
        files = b",".join([canonical_json(file.model_dump(mode="json")) for file in self.files])
        rest = sorted(self.model_dump(mode="json", exclude={"files"}).items())
        head = b"".join(b'"%b":%b,' % (key.encode(), canonical_json(value)) for key, value in rest if key < "files")
        tail = b"".join(b',"%b":%b' % (key.encode(), canonical_json(value)) for key, value in rest if key > "files")
        return b'{%b"files":[%b]%b}' % (head, files, tail)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @property
    def size_bytes(self) -> int:
        return sum(file.size for file in self.files)


class Artifact(FrozenModel):
    """A pointer to bytes in the object store: `uri` is a logical folder, `digest` the SHA-256 of its manifest."""

    kind: str
    uri: str
    digest: str
    size_bytes: int
