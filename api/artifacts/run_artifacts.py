"""Check names of artifact files, and map them to the object store.

Files of a run or logged model are stored at `s3://hanzo-ml/runs/{run or model}/artifacts/NAME`, independent of its
experiment's artifact location (ids are unique across both). Files at a free path of the artifact proxy are stored at
`s3://hanzo-ml/artifacts/@{organization}/NAME`, so no free path can reach a run's file, a dataset, a checkpoint, or another
organization. Who owns a path is decided by `locations`.
"""

import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from starlette.concurrency import run_in_threadpool

from api.artifacts.published_files import UPLOADS_FOLDER, list_keys, published_folders, published_uri
from api.artifacts.verified_files import ExpectedChecksums, UploadedFile, VerifiedFile, VerifiedFiles
from recipes.storage import uris
from recipes.storage.artifact_store import Store
from resources.errors import ErrorCode, HanzoError, invalid, not_found

FORBIDDEN_CHARACTERS = re.compile(r"[\x00-\x1f\x7f\\#?\ud800-\udfff\ufffd]")
"""Characters with a meaning to some URI, shell or decoder; U+FFFD results from decoding bytes that are not UTF-8."""
LOGGED_IMAGE = re.compile(r"[^/%]+%step%\d+%timestamp%\d+%[a-zA-Z0-9-]+(%compressed)?\.[a-z]+", re.ASCII)
"""File names that MLflow's older clients use for `log_image(image, key=..., step=100)`: "%10" is not an encoding there."""
MAX_NAME_BYTES = 255
MAX_PATH_BYTES = 1000
MAX_NEW_NAME_BYTES = 240
"""File systems allow 255; the store appends a suffix during an upload."""
MAX_KEY_BYTES = 1024
"""The limit of S3, including the folder of the owner's files."""


@dataclass(frozen=True)
class Entry:
    """A file or folder directly below another. `size` is None for folders."""

    path: str
    is_dir: bool
    size: int | None = None


def is_logged_image(name: str) -> bool:
    return LOGGED_IMAGE.fullmatch(name) is not None


def checked_path(path: str) -> str:
    """Return a relative path; raise a 400 for an ambiguous or escaping one."""
    parts = path.split("/")
    # Decoding must not change the path, or another program could read another name; a lone percent sign ("50 %") is fine.
    plain = "/".join(parts[:-1]) if is_logged_image(parts[-1]) else path
    if FORBIDDEN_CHARACTERS.search(path) or unquote(plain) != plain or any(part in ("", ".", "..") for part in parts):
        raise invalid("Invalid path")  # literally: MLflow's clients and tests compare it
    if len(path.encode()) > MAX_PATH_BYTES or any(len(part.encode()) > MAX_NAME_BYTES for part in parts):
        raise invalid(f"Invalid artifact path: at most {MAX_NAME_BYTES} bytes in a name, {MAX_PATH_BYTES} in all")
    return path


def checked_folder(path: str) -> str:
    """As `checked_path`, for listings: clients send ".", "./folder", and a trailing slash."""
    folder = "/".join(part for part in path.removesuffix("/").split("/") if part != ".")
    return checked_path(folder) if folder else ""


def check_storable(path: str, uri: str) -> None:
    """Raise a 400 for a name too long to store: clients retry a 503 forever."""
    key = uri.partition("://")[2].partition("/")[2]
    if any(len(part.encode()) > MAX_NEW_NAME_BYTES for part in path.split("/")) or len(key.encode()) > MAX_KEY_BYTES:
        raise invalid(
            f"'{path[:100]}' is too long to be stored: at most {MAX_NEW_NAME_BYTES} bytes in a name, and {MAX_KEY_BYTES} in "
            f"all with '{key.removesuffix(path)}' before it"
        )


class OwnedArtifacts:
    """Files in an object store, grouped by owner.

    Args:
        owner_folder: returns the URI of an owner's files.
    """

    def __init__(self, files: VerifiedFiles, owner_folder: Callable[[str], str]) -> None:
        self._files = files
        self._store = files.store
        self._owner_folder = owner_folder

    def uri(self, owner: str, path: str) -> str:
        """Return the logical URI of an owner's file, or of the owner's folder."""
        return self._owner_folder(owner) + (f"/{path}" if path else "")

    async def receive(
        self, owner: str, path: str, body: AsyncIterator[bytes], promised: ExpectedChecksums, declared_size: int | None
    ) -> UploadedFile:
        """Store a body under `path`, completely or not at all."""
        uri = self.uri(owner, checked_path(path))
        await run_in_threadpool(self.check_free, owner, path)
        return await self._files.receive(uri, body, promised, declared_size)

    def entries(self, owner: str, folder: str) -> list[Entry]:
        """List entries directly below a folder, by name; empty without such a folder."""
        folder = checked_folder(folder)
        return entries_below(self._store, self.uri(owner, folder), f"{folder}/" if folder else "")

    def open(self, owner: str, path: str) -> VerifiedFile:
        """Open a file and verify it.

        Raises:
            HanzoError: 404 if there is none, 409 if its bytes are not the recorded ones.
        """
        return self._open(self.uri(owner, checked_path(path)), owner, path)

    def _open(self, uri: str, owner: str, path: str) -> VerifiedFile:
        try:
            return self._files.open(uri, owner)
        except FileNotFoundError:
            raise (not_a_file(path) if any(self._store.list_folder(uri)) else no_artifact(path)) from None

    def delete(self, owner: str, path: str) -> None:
        """Delete a file, or everything below a folder ("" for all), if it exists."""
        uri = self.uri(owner, checked_folder(path))
        if self._store.exists(uri):
            self._files.delete(uri)

    def check_free(self, owner: str, path: str) -> None:
        """Raise a 400 if the path is an existing folder, or below an existing file.

        A file system cannot store both under one name; S3 could, but must behave the same.
        """
        check_storable(path, self.uri(owner, path))
        parents = path.split("/")[:-1]
        if any(self._is_file(self.uri(owner, "/".join(parents[: end + 1]))) for end in range(len(parents))):
            raise invalid("Invalid artifact path: a parent folder of it is an existing file")
        if any(self._store.list_folder(self.uri(owner, path))):
            raise invalid("Invalid artifact path: it is an existing folder")

    def _is_file(self, uri: str) -> bool:
        try:
            self._store.size(uri)
        except FileNotFoundError:
            return False
        return True


class RunArtifacts(OwnedArtifacts):
    """Files of runs and of logged models: uploads, and what a run's job published.

    An uploaded file takes precedence over a published one of the same name.
    """

    def __init__(self, files: VerifiedFiles) -> None:
        super().__init__(files, uris.run_artifacts)

    def keys(self, owner: str) -> list[dict[str, Any]]:
        """List everything that a run has in the store, for `/v1`."""
        return list_keys(self._store, owner)

    def entries(self, owner: str, folder: str) -> list[Entry]:
        folder = checked_folder(folder)
        found = {entry.path: entry for entry in (*self._published(owner, folder), *super().entries(owner, folder))}
        return [found[path] for path in sorted(found)]

    def open(self, owner: str, path: str) -> VerifiedFile:
        try:
            return super().open(owner, path)
        except HanzoError as refused:
            absent = refused.code == ErrorCode.RESOURCE_DOES_NOT_EXIST
            if not absent or (uri := published_uri(self._store, owner, path)) is None:
                raise
        return self._open(uri, owner, path)

    def delete(self, owner: str, path: str) -> None:
        """Delete uploaded files; raise a 400 for a path that names only published ones."""
        if path and not self._store.exists(self.uri(owner, checked_folder(path))) and self._is_published(owner, path):
            raise invalid(f"'{path}' was published by the run's job, not uploaded, and cannot be deleted")
        super().delete(owner, path)

    def _is_published(self, owner: str, path: str) -> bool:
        folder = checked_folder(path)
        uri = published_uri(self._store, owner, folder)
        return self._store.exists(uri) if uri else bool(published_folders(self._store, owner, folder))

    def _published(self, owner: str, folder: str) -> list[Entry]:
        names = published_folders(self._store, owner, folder)
        if names is not None:
            return [Entry(f"{folder}/{name}", True) for name in names]
        if (uri := published_uri(self._store, owner, folder)) is None:
            return []
        found = entries_below(self._store, uri, f"{folder}/" if folder else "")
        if folder:
            return found
        at_root = [Entry("checkpoint", True)] if published_folders(self._store, owner, "checkpoint") else []
        return [*at_root, *(entry for entry in found if entry.path != UPLOADS_FOLDER)]


def entries_below(store: Store, root: str, prefix: str) -> list[Entry]:
    """List files and folders directly below a URI, by name, each with `prefix` prepended."""
    files, folders = store.list_folder(root)
    found = [Entry(prefix + file_name(file.uri), False, file.size) for file in files]
    found += [Entry(prefix + file_name(folder), True) for folder in folders]
    return sorted(found, key=lambda entry: entry.path)


def file_name(uri: str) -> str:
    return uri.rpartition("/")[2]


def not_a_file(path: str) -> HanzoError:
    return invalid(f"Artifact path refers to a directory, not a file: '{path}'")


def no_artifact(path: str) -> HanzoError:
    return not_found(f"No such artifact: '{path}'")
