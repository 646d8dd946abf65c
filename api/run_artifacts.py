"""The files of a run: names checked, then mapped onto the object store.

MLflow names them `mlflow-artifacts:/{experiment}/{run}/artifacts/NAME`, the product `s3://hanzo-ml/runs/{run}/artifacts/NAME`.
What belongs here: that mapping, and what may be a name. What does not: whether the run exists and may be written to.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from recipes.store import MANIFEST, Store
from resources.errors import HanzoError, invalid, not_found

FORBIDDEN = re.compile(r"[\x00-\x1f\x7f\\#?%\ud800-\udfff\ufffd]")
"""Characters that some URI, shell or decoder reads as structure; a percent sign would be a second encoding, and U+FFFD is
what bytes that are no UTF-8 are decoded to."""
MAX_NAME_BYTES = 255
MAX_PATH_BYTES = 1000


@dataclass(frozen=True)
class Entry:
    """A file or folder directly below another. `size` is None for folders, and where the store does not tell it."""

    path: str
    is_dir: bool
    size: int | None = None


def checked_path(path: str) -> str:
    """A relative path that means the same to everybody. Raises a 400 for anything that climbs, escapes or hides."""
    parts = path.split("/")
    if FORBIDDEN.search(path) or any(part in ("", ".", "..") for part in parts):
        raise invalid("Invalid artifact path: use names without '..', '\\', '#', '?' and '%', separated by single slashes")
    if len(path.encode()) > MAX_PATH_BYTES or any(len(part.encode()) > MAX_NAME_BYTES for part in parts):
        raise invalid(f"Invalid artifact path: at most {MAX_NAME_BYTES} bytes in a name, {MAX_PATH_BYTES} in all")
    return path


class RunArtifacts:
    """Files of runs in an object store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def put(self, run_id: str, path: str, source: Path) -> str:
        """Store a local file under `path`, whole or not at all. Returns its logical URI."""
        uri = artifact_uri(run_id, checked_path(path))
        parents = path.split("/")[:-1]
        if any(self._is_file(artifact_uri(run_id, "/".join(parents[: end + 1]))) for end in range(len(parents))):
            raise invalid("Invalid artifact path: a part of it is a file already")
        if self._store.list(uri):
            raise invalid("Invalid artifact path: it is a folder already")
        self._store.put_file(uri, source)
        return uri

    def entries(self, run_id: str, folder: str) -> list[Entry]:
        """What lies directly below a folder, by name; nothing where there is no such folder."""
        root = artifact_uri(run_id, checked_path(folder) if folder else "")
        below = [uri.removeprefix(root + "/") for uri in self._store.list(root)]
        names = sorted({name.partition("/")[0]: "/" in name for name in below}.items())
        prefix = f"{folder}/" if folder else ""
        return [
            Entry(prefix + name, is_dir, None if is_dir else self._size(artifact_uri(run_id, prefix + name)))
            for name, is_dir in names
        ]

    def local_file(self, run_id: str, path: str) -> Path | None:
        """The file itself, where the store is a folder. Raises a 404 where it is missing, None where it is elsewhere."""
        local = self._store.local_path(artifact_uri(run_id, checked_path(path)))
        if local is not None and not local.is_file():
            raise no_artifact(path)
        return local

    def read(self, run_id: str, path: str) -> bytes:
        # Whole, through memory: only where the store is no folder, else `local_file` serves it.
        try:
            return self._store.get_bytes(artifact_uri(run_id, checked_path(path)))
        except FileNotFoundError:
            raise no_artifact(path) from None

    def delete(self, run_id: str, path: str) -> None:
        """Delete a file, or everything below a folder."""
        uri = artifact_uri(run_id, checked_path(path))
        if not self._store.exists(uri):
            raise no_artifact(path)
        self._store.delete(uri)

    def published(self, run_id: str) -> list[dict[str, str]]:
        """Everything that a run has in the store, as the specification's {key, path}; an artifact with a manifest is one."""
        root = f"s3://hanzo-ml/runs/{run_id}"
        uris = self._store.list(root)
        folders = [uri.removesuffix(MANIFEST) for uri in uris if uri.endswith("/" + MANIFEST)]
        files = [uri for uri in uris if not any(uri.startswith(folder) for folder in folders)]
        return [
            {"key": uri.removeprefix(f"{root}/").removeprefix("artifacts/").rstrip("/"), "path": uri}
            for uri in sorted([*folders, *files])
        ]

    def _is_file(self, uri: str) -> bool:
        local = self._store.local_path(uri)
        return local is not None and local.is_file()

    def _size(self, uri: str) -> int | None:
        local = self._store.local_path(uri)
        return None if local is None else local.stat().st_size


def artifact_uri(run_id: str, path: str) -> str:
    """The logical URI of a run's file. Quoted, because `Store` reads URIs."""
    return f"s3://hanzo-ml/runs/{run_id}/artifacts" + (f"/{path}" if path else "")


def no_artifact(path: str) -> HanzoError:
    return not_found(f"There is no artifact '{path}'")
