"""Object stores that record uploads or accept a limited size."""

from collections.abc import Callable
from pathlib import Path

from recipes.contracts.job import StoreAddress
from recipes.storage.artifact_store import MANIFEST_FILE, Store
from recipes.storage.buckets import StoreFull

PLACE = "s3://hanzo-ml/checkpoints/job"


class Watched(Store):
    """Store that records uploads and runs a callback after one.

    Like S3 it has no local path.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(StoreAddress(root=folder.as_uri(), buckets={"checkpoints": "checkpoints"}))
        self.sent: list[str] = []
        self.then: dict[str, Callable[[], None]] = {}

    def local_path(self, uri: str) -> Path | None:
        return None

    def put_file(self, uri: str, path: Path) -> None:
        super().put_file(uri, path)
        name = uri.rpartition("/")[2]
        self.sent.append(name)
        self.then.pop(name, lambda: None)()


class Small(Watched):
    """Store with room for `size` bytes of files."""

    def __init__(self, folder: Path, size: int) -> None:
        super().__init__(folder)
        self.room = size

    def put_file(self, uri: str, path: Path) -> None:
        held = sum(entry.size for entry in self.entries(PLACE) if not entry.uri.endswith(MANIFEST_FILE))
        if held + path.stat().st_size > self.room:
            raise StoreFull(f"{uri}: no space is left")
        super().put_file(uri, path)
