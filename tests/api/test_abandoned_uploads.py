"""Parts of killed uploads are removed while a server runs, not only at its start."""

import os
import threading
import time
from pathlib import Path

import pytest

from api import background_tasks as abandoned_uploads
from recipes.contracts.job import StoreAddress
from recipes.storage.artifact_store import Store


def test_abandoned_upload_is_removed_while_the_server_keeps_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kill of a trainer during an upload left a part of a checkpoint.

    It stayed for as long as the server ran.
    """
    address = StoreAddress(root=(tmp_path / "objects").as_uri(), buckets={"checkpoints": "c"})
    Store(address).put_bytes("s3://hanzo-ml/checkpoints/run-1/whole", b"whole")
    monkeypatch.setattr(abandoned_uploads, "ABANDONED_AFTER_SECONDS", 0.01)
    stopped = threading.Event()
    abandoned_uploads.start_upload_cleanup(address, {}, stopped)
    try:
        for name in ("first#1", "second#1"):
            left = tmp_path / "objects" / "c" / "checkpoints" / name
            scratch = tmp_path / name
            scratch.write_bytes(b"half")
            os.utime(scratch, (0, 0))
            scratch.rename(left)
            end = time.monotonic() + 60
            while left.exists():
                assert time.monotonic() < end, f"{name} is still there"
                time.sleep(0.01)
    finally:
        stopped.set()
