"""The log of a job's program: its end, or all of it, followed while it grows."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

from starlette.concurrency import run_in_threadpool

from resources.detached import LOG
from resources.metadata.database import Database
from resources.metadata.jobs import ENDED, WORK_FOLDERS, JobRecord, Jobs
from resources.settings import Settings

POLL_SECONDS = 0.5
QUIET_SECONDS = 15.0
"""How long a log that is followed may send nothing: proxies and clients give up on a connection after half a minute."""
LOG_BYTES = 1 << 20
"""Of a log that are read at a time."""
LAST_BYTES, LAST_LINES = 64 << 10, 100
"""Of a log that a job is told with, at most."""


def log_of(job: JobRecord, settings: Settings) -> Path:
    return settings.home / "jobs" / job.id / WORK_FOLDERS[job.type] / LOG


async def events(database: Database, job_id: str, path: Path, follow: bool) -> AsyncIterator[str]:
    """Waits without a thread: forty who followed jobs that say nothing had all that the server has."""
    offset, told_at = 0, time.monotonic()
    while True:
        status = (await run_in_threadpool(Jobs(database).read, job_id)).status
        is_last = status in ENDED or not follow
        while lines := await run_in_threadpool(new_lines, path, offset, is_last):
            offset, told_at = offset + len(lines), time.monotonic()
            yield "".join(f"data: {line.decode(errors='replace')}\n\n" for line in lines.splitlines())
        if is_last:
            yield f"event: end\ndata: {status}\n\n"
            return
        if time.monotonic() - told_at >= QUIET_SECONDS:
            told_at = time.monotonic()
            yield f": {status}\n\n"
        await asyncio.sleep(POLL_SECONDS)


def last_lines(path: Path) -> list[str]:
    """The newest lines of a log; of one that is longer than is read, a part."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LAST_BYTES))
        return file.read(LAST_BYTES).decode(errors="replace").splitlines()[-LAST_LINES:]


def new_lines(path: Path, offset: int, is_last: bool) -> bytes:
    """The next whole lines of a log, some of them where there are many; a line that is longer than that comes in parts.

    What a progress bar has drawn over is a line as well. One that has not ended is told where this look is the last one.
    """
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read(LOG_BYTES)
    end = max(data.rfind(b"\n"), data.rfind(b"\r", 0, -1)) + 1  # behind a last "\r" the "\n" of the same end may follow
    return data[:end] or (data if is_last or len(data) == LOG_BYTES else b"")
