"""The files of a run, of a logged model or of nobody: names checked, then mapped onto the object store.

The product names a run's or a logged model's `s3://hanzo-ml/runs/{run or model}/artifacts/NAME`, wherever its experiment
keeps its files (an id names one thing, whatever it is), and those at a free path of the artifact proxy
`s3://hanzo-ml/artifacts/@{organization}/NAME`: so no free path is a run's file, a dataset or a checkpoint, or another
organization's. What belongs here: that mapping, and what may be a name. What does not: whose a path is (`locations`).
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
"""Characters that some URI, shell or decoder reads as structure; U+FFFD is what bytes that are no UTF-8 are decoded to."""
LOGGED_IMAGE = re.compile(r"[^/%]+%step%\d+%timestamp%\d+%[a-zA-Z0-9-]+(%compressed)?\.[a-z]+", re.ASCII)
"""What MLflow's older clients call what `log_image(image, key=..., step=100)` writes: "%10" is no encoding there."""
MAX_NAME_BYTES = 255
MAX_PATH_BYTES = 1000
MAX_NEW_NAME_BYTES = 240
"""A file system takes 255, of which the store needs some for itself while a file arrives."""
MAX_KEY_BYTES = 1024
"""What S3 takes, with the place of the owner's files in it."""


@dataclass(frozen=True)
class Entry:
    """A file or folder directly below another. `size` is None for folders."""

    path: str
    is_dir: bool
    size: int | None = None


def is_logged_image(name: str) -> bool:
    return LOGGED_IMAGE.fullmatch(name) is not None


def checked_path(path: str) -> str:
    """A relative path that means the same to everybody. Raises a 400 for anything that climbs, escapes or hides."""
    parts = path.split("/")
    # What can be decoded once more would be another name to whoever does; a percent sign alone ("50 %") is one.
    plain = "/".join(parts[:-1]) if is_logged_image(parts[-1]) else path
    if FORBIDDEN_CHARACTERS.search(path) or unquote(plain) != plain or any(part in ("", ".", "..") for part in parts):
        raise invalid("Invalid path")  # literally: MLflow's clients and tests compare it
    if len(path.encode()) > MAX_PATH_BYTES or any(len(part.encode()) > MAX_NAME_BYTES for part in parts):
        raise invalid(f"Invalid artifact path: at most {MAX_NAME_BYTES} bytes in a name, {MAX_PATH_BYTES} in all")
    return path


def checked_folder(path: str) -> str:
    """As `checked_path`, for what is listed: clients ask for "." and "./folder", and write a slash at the end."""
    folder = "/".join(part for part in path.removesuffix("/").split("/") if part != ".")
    return checked_path(folder) if folder else ""


def check_storable(path: str, uri: str) -> None:
    """Raises a 400 for a new name that no store takes: who is told that the store is not available sends it for ever."""
    key = uri.partition("://")[2].partition("/")[2]
    if any(len(part.encode()) > MAX_NEW_NAME_BYTES for part in path.split("/")) or len(key.encode()) > MAX_KEY_BYTES:
        raise invalid(
            f"'{path[:100]}' is too long to be stored: at most {MAX_NEW_NAME_BYTES} bytes in a name, and {MAX_KEY_BYTES} in "
            f"all with '{key.removesuffix(path)}' before it"
        )


class OwnedArtifacts:
    """Files in an object store, each of an owner.

    Args:
        owner_folder: the URI of an owner's files.
    """

    def __init__(self, files: VerifiedFiles, owner_folder: Callable[[str], str]) -> None:
        self._files = files
        self._store = files.store
        self._owner_folder = owner_folder

    def uri(self, owner: str, path: str) -> str:
        """The logical URI of an owner's file, or of all of them."""
        return self._owner_folder(owner) + (f"/{path}" if path else "")

    async def receive(
        self, owner: str, path: str, body: AsyncIterator[bytes], promised: ExpectedChecksums, declared_size: int | None
    ) -> UploadedFile:
        """Store a body under `path`, whole or not at all."""
        uri = self.uri(owner, checked_path(path))
        await run_in_threadpool(self.check_free, owner, path)
        return await self._files.receive(uri, body, promised, declared_size)

    def entries(self, owner: str, folder: str) -> list[Entry]:
        """What lies directly below a folder, by name; nothing where there is no such folder."""
        folder = checked_folder(folder)
        return entries_below(self._store, self.uri(owner, folder), f"{folder}/" if folder else "")

    def open(self, owner: str, path: str) -> VerifiedFile:
        """The file, verified. Raises a 404 where there is none, a 409 where its bytes are not the recorded ones."""
        return self._open(self.uri(owner, checked_path(path)), owner, path)

    def _open(self, uri: str, owner: str, path: str) -> VerifiedFile:
        try:
            return self._files.open(uri, owner)
        except FileNotFoundError:
            raise (not_a_file(path) if any(self._store.list_folder(uri)) else no_artifact(path)) from None

    def delete(self, owner: str, path: str) -> None:
        """Delete a file, or everything below a folder ("" for all). Where there is none nothing happens."""
        uri = self.uri(owner, checked_folder(path))
        if self._store.exists(uri):
            self._files.delete(uri)

    def check_free(self, owner: str, path: str) -> None:
        """In a folder nothing can be a file and a folder; what works there and what works on S3 is the same."""
        check_storable(path, self.uri(owner, path))
        parents = path.split("/")[:-1]
        if any(self._is_file(self.uri(owner, "/".join(parents[: end + 1]))) for end in range(len(parents))):
            raise invalid("Invalid artifact path: a part of it is a file already")
        if any(self._store.list_folder(self.uri(owner, path))):
            raise invalid("Invalid artifact path: it is a folder already")

    def _is_file(self, uri: str) -> bool:
        try:
            self._store.size(uri)
        except FileNotFoundError:
            return False
        return True


class RunArtifacts(OwnedArtifacts):
    """Files of runs and of logged models: what was uploaded, and beside it what a run's job published. Of two by the same
    name the uploaded one counts.
    """

    def __init__(self, files: VerifiedFiles) -> None:
        super().__init__(files, uris.run_artifacts)

    def keys(self, owner: str) -> list[dict[str, Any]]:
        """Everything that a run has in the store, for `/v1`."""
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
        """As of any owner's files, but what the job published stays: 400 where it is named."""
        if path and not self._store.exists(self.uri(owner, checked_folder(path))) and self._is_published(owner, path):
            raise invalid(f"'{path}' was made by the run's job, not uploaded: it stays")
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
    """Files and folders directly below a URI, by name; `prefix` goes before each."""
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
