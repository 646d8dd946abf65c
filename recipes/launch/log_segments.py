"""The log of a pod: passed on to its own stdout, and uploaded in segments that never change.

Output is spooled to disk and uploaded by a thread of its own, so that a store that is away neither stops nor slows the
program. Readers concatenate the segments: offsets stay valid while the log grows.
"""

import os
import select
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

from recipes.storage.artifact_store import Store
from recipes.storage.buckets import StoreRefuses

SEGMENT_SECONDS = 5.0
RETRY_SECONDS = 1.0
"""Pause between two attempts to upload the rest, once the program has ended."""
REFUSED_SECONDS = 60.0
"""A token that was revoked, or an attempt that was replaced, stays so: nothing that the program makes can be stored."""
MAX_SPOOL_BYTES = 1 << 30
"""Bytes that wait on disk while the store is away. What comes after them is on stdout alone."""


PIPE_BYTES = 4096
"""A pipe that is ready takes so many bytes without blocking."""
STALL_SECONDS = 1.0


class LiveOutput:
    """A copy of the output on a descriptor, for `kubectl logs`.

    The container runtime reads it. While it is restarted nobody does, and a program that waited for it would stop: what is
    not taken within a second is left out, and from then on whatever would block.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._wait_seconds = descriptor, STALL_SECONDS

    def write(self, data: bytes) -> None:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        with suppress(OSError):
            while data:
                if not poll.poll(self._wait_seconds * 1000):
                    self._wait_seconds = 0.0
                    return
                self._wait_seconds = STALL_SECONDS
                data = data[os.write(self._descriptor, data[:PIPE_BYTES]) :]


class LogSpool:
    """Output that waits on disk, in one file for each segment. Safe for several threads."""

    def __init__(self, folder: Path, stdout: int = 1) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._live = folder, LiveOutput(stdout)
        self._lock = threading.Lock()
        self._closed: deque[Path] = deque()
        self._number, self._size, self._lost = 0, 0, 0

    def write(self, data: bytes) -> None:
        """Pass output on and spool it. A full disk costs the copy in the store, never the program."""
        with self._lock:
            self._live.write(data)
            try:
                if self._size + len(data) > MAX_SPOOL_BYTES:
                    raise OSError("the spool is full")
                with self._open_segment().open("ab") as file:
                    file.write(data)
                self._size += len(data)
            except OSError:
                self._lost += len(data)

    def write_line(self, text: str) -> None:
        self.write(f"{time.strftime('%H:%M:%S')} {text}\n".encode())

    def close_segment(self) -> None:
        """What comes from now on is in the next segment."""
        with self._lock:
            lost, self._lost = self._lost, 0
            if lost:
                with suppress(OSError), self._open_segment().open("ab") as file:
                    file.write(f"\n... {lost} bytes of output were not stored: no space to spool them\n".encode())
            if self._open_segment().exists():
                self._closed.append(self._open_segment())
                self._number += 1

    def oldest_segment(self) -> Path | None:
        """The first closed segment that is not removed."""
        with self._lock:
            return self._closed[0] if self._closed else None

    def remove_oldest(self) -> None:
        """The oldest closed segment is stored."""
        with self._lock:
            path = self._closed.popleft()
            self._size -= path.stat().st_size
            path.unlink()

    def _open_segment(self) -> Path:
        return self._folder / f"{self._number:06d}.log"


class LogUploader(threading.Thread):
    """Uploads the segments of a spool below `uri`, in order."""

    def __init__(self, spool: LogSpool, store: Store, uri: str) -> None:
        super().__init__(name="log uploader", daemon=True)  # a store that hangs must not keep the launcher from exiting
        self._spool, self._store, self._uri = spool, store, uri
        self._next: int | None = None
        self._error: Exception | None = None
        self._refused_at: float | None = None
        self._finishing = threading.Event()

    def run(self) -> None:
        while True:
            finishing = self._finishing.wait(SEGMENT_SECONDS)
            self._spool.close_segment()
            if (self._upload() or isinstance(self._error, StoreRefuses)) and finishing:
                return  # a newer attempt has replaced this one, or the token is not valid any more
            if finishing:
                time.sleep(RETRY_SECONDS)

    @property
    def refusal(self) -> str:
        """Why the store has refused this pod for `REFUSED_SECONDS`; empty while it has not."""
        since = self._refused_at
        return str(self._error) if since is not None and time.monotonic() - since > REFUSED_SECONDS else ""

    def finish(self, seconds: float) -> bool:
        """Upload the rest. Returns whether that is over; called again it waits again."""
        self._finishing.set()
        self.join(seconds)
        return not self.is_alive()

    def _upload(self) -> bool:
        """Store all closed segments; False where the store does not take one, which is tried again."""
        try:
            if self._next is None:
                self._next = self._first_free_number()
            while path := self._spool.oldest_segment():
                self._store.put_file(f"{self._uri}/{self._next:06d}.log", path)
                self._next += 1
                self._spool.remove_oldest()
        except Exception as error:  # whatever the store fails with, the next attempt may succeed
            if self._error is None:
                cause = " ".join(str(error).split())
                print(f"the log waits on disk: {type(error).__name__}: {cause}", file=sys.stderr, flush=True)
            self._error = error
            if not isinstance(error, StoreRefuses):
                self._refused_at = None
            elif self._refused_at is None:
                self._refused_at = time.monotonic()
            return False
        self._error = self._refused_at = None
        return True

    def _first_free_number(self) -> int:
        """Segments never change: a pod that joins an attempt that had its rank before appends to its log."""
        names = (uri.rpartition("/")[2] for uri in self._store.list(self._uri))
        return max((int(name.removesuffix(".log")) + 1 for name in names if name.endswith(".log")), default=0)
