"""A pod's log: copied to its own stdout and uploaded in immutable segments.

Output is spooled to disk and uploaded by a separate thread, so that an unavailable store neither stops nor slows the
program. Readers concatenate the segments, so that offsets stay valid while the log grows.
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
"""Pause between upload attempts after the program has ended."""
REFUSED_SECONDS = 60.0
"""A revoked token or a superseded attempt is permanent: nothing that the program writes can be stored."""
MAX_SPOOL_BYTES = 1 << 30
"""Maximum size of output spooled while the store is unavailable; further output goes to stdout only."""


PIPE_BYTES = 4096
"""Bytes that a ready pipe accepts without blocking."""
STALL_SECONDS = 1.0


class LiveOutput:
    """A copy of the output on a file descriptor, for `kubectl logs`.

    While the container runtime restarts, the pipe has no reader, and a program that waited for it would stop. Output that is
    not accepted within a second is dropped, and from then on any output that would block.
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
    """Output spooled to disk, one file per segment. Thread-safe."""

    def __init__(self, folder: Path, stdout: int = 1) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._live = folder, LiveOutput(stdout)
        self._lock = threading.Lock()
        self._closed: deque[Path] = deque()
        self._number, self._size, self._lost = 0, 0, 0

    def write(self, data: bytes) -> None:
        """Copy output to stdout and spool it.

        A full disk costs the stored copy, never the program.
        """
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
        """Start a new segment."""
        with self._lock:
            lost, self._lost = self._lost, 0
            if lost:
                with suppress(OSError), self._open_segment().open("ab") as file:
                    file.write(f"\n... {lost} bytes of output were not stored: no space to spool them\n".encode())
            if self._open_segment().exists():
                self._closed.append(self._open_segment())
                self._number += 1

    def oldest_segment(self) -> Path | None:
        """Return the oldest closed segment, or None."""
        with self._lock:
            return self._closed[0] if self._closed else None

    def remove_oldest(self) -> None:
        """Remove the oldest closed segment after its upload."""
        with self._lock:
            path = self._closed.popleft()
            self._size -= path.stat().st_size
            path.unlink()

    def _open_segment(self) -> Path:
        return self._folder / f"{self._number:06d}.log"


class LogUploader(threading.Thread):
    """Uploads the segments of a spool below `uri`, in order."""

    def __init__(self, spool: LogSpool, store: Store, uri: str) -> None:
        # daemon: a store that hangs must not keep the launcher from exiting
        super().__init__(name="log uploader", daemon=True)
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
                return  # a newer attempt has superseded this one, or the token is no longer valid
            if finishing:
                time.sleep(RETRY_SECONDS)

    @property
    def refusal(self) -> str:
        """Why the store has been refusing this pod for `REFUSED_SECONDS`; empty if it has not."""
        since = self._refused_at
        return str(self._error) if since is not None and time.monotonic() - since > REFUSED_SECONDS else ""

    def finish(self, seconds: float) -> bool:
        """Upload the rest, and return whether that is finished.

        May be called again to wait longer.
        """
        self._finishing.set()
        self.join(seconds)
        return not self.is_alive()

    def _upload(self) -> bool:
        """Upload all closed segments; return False if the store failed, to retry later."""
        try:
            if self._next is None:
                self._next = self._first_free_number()
            while path := self._spool.oldest_segment():
                self._store.put_file(f"{self._uri}/{self._next:06d}.log", path)
                self._next += 1
                self._spool.remove_oldest()
        except Exception as error:  # after any error of the store the next attempt may succeed
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
        """Return the next segment number.

        A pod that joins an attempt again appends to its rank's log.
        """
        names = (uri.rpartition("/")[2] for uri in self._store.list(self._uri))
        return max((int(name.removesuffix(".log")) + 1 for name in names if name.endswith(".log")), default=0)
