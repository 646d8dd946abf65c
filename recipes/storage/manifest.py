"""Artifact manifests, and the canonical JSON that their digests hash."""

import hashlib
import json
from typing import Any

from pydantic import Field, JsonValue, SerializerFunctionWrapHandler, model_serializer

from recipes.contracts.frozen_model import FrozenModel

# Canonical JSON: equal values have equal bytes, and so equal hashes.


def canonical_json(value: Any) -> bytes:
    """Serialize a JSON value canonically, so that equal values have equal hashes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


# Manifests and pointers to artifacts. They are read and written by `recipes.storage.artifact_store`.


class Chunk(FrozenModel):
    """Part of a file stored under its hash (`recipes.storage.locations`); `size` is in bytes."""

    sha256: str
    size: int


class LineSelection(FrozenModel):
    """Lines of a file of another artifact, in their original order (`recipes.storage.line_selection`).

    Attributes:
        of: digest of the other artifact. Its URI is stored separately, because it differs between stores.
        path: the file.
        before: number of records in the artifact's earlier files.
        records: number of lines in the file.
        chosen: number of selected lines.
        sha256: hash of the bitmap, which has one bit per line.
    """

    of: str
    path: str
    before: int
    records: int
    chosen: int
    sha256: str


class FileRecord(FrozenModel):
    """One file of an artifact.

    `path` is relative to the artifact, `sha256` is hexadecimal, `size` is in bytes. A file stored in chunks lists them in
    order, and one that consists of selected lines describes the selection. A file stored at its path has neither key in
    JSON, so that manifest digests stay as they were before these features.

    Args:
        mode: permission bits, if not the default (`recipes.storage.folder_tree`).
        object: name of its object in the artifact, if that cannot be `path` (`recipes.storage.object_names`).
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
        """Name of its object, unless it is stored in chunks or selected lines."""
        return self.object or self.path

    @model_serializer(mode="wrap")
    def omit_empty_fields(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        document: dict[str, Any] = serialize(self)
        return {key: value for key, value in document.items() if key in FILE_KEYS or value or (key, value) == ("mode", 0)}


FILE_KEYS = ("path", "sha256", "size")
"""Keys that are always present in a file's JSON."""


class FolderRecord(FrozenModel):
    """A folder that file paths do not imply.

    It is empty, or its mode is not the default.
    """

    path: str
    mode: int | None = Field(None, ge=0, le=0o777)

    @model_serializer(mode="wrap")
    def omit_default_mode(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        document: dict[str, Any] = serialize(self)
        return {key: value for key, value in document.items() if value is not None}


class LinkRecord(FrozenModel):
    """A symbolic link; `target` is relative to the link's folder and stays inside the artifact."""

    path: str
    target: str


class Manifest(FrozenModel):
    """Files of an artifact and the digests it was made from.

    The manifest's digest identifies the artifact. A manifest holds nothing that differs between two runs of the same work
    (no time, no host), so that equal work has equal digests; only a checkpoint's manifest holds the training time. `inputs`
    maps roles to digests of other manifests: the chain that `prove` walks. `folders` and `links` are left out of the JSON if
    empty.
    """

    kind: str
    files: tuple[FileRecord, ...]
    inputs: dict[str, str] = Field(default_factory=dict)
    facts: dict[str, JsonValue] = Field(default_factory=dict)
    folders: tuple[FolderRecord, ...] = Field((), exclude_if=lambda folders: not folders)
    links: tuple[LinkRecord, ...] = Field((), exclude_if=lambda links: not links)

    def to_bytes(self) -> bytes:
        """Serialize to canonical JSON.

        File by file, because all files as dictionaries need seven times the memory of the JSON.
        """
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
    """A pointer to bytes in the object store.

    `uri` is a logical folder, `digest` the SHA-256 of its manifest.
    """

    kind: str
    uri: str
    digest: str
    size_bytes: int
