"""The log of a job's program, read from the compute backend: its end, or all of it, followed while it grows."""

import asyncio
import time
from collections.abc import AsyncIterator

from starlette.concurrency import run_in_threadpool

from resources.compute.base import Compute
from resources.compute.job_key import JobKey
from resources.metadata.database import Database
from resources.metadata.jobs import ENDED_STATUSES, Jobs

POLL_SECONDS = 0.5
QUIET_SECONDS = 15.0
"""How long a followed log may send nothing: proxies and clients close a connection after half a minute."""
MAX_READ_BYTES = 1 << 20
"""Bytes of a log that are read at a time."""
MAX_TAIL_BYTES, MAX_TAIL_LINES = 64 << 10, 100
"""How much of its log a job is shown with."""


async def events(database: Database, compute: Compute, job: JobKey, follow: bool) -> AsyncIterator[str]:
    """The log as server-sent events. Waits without a thread: forty followers of silent jobs used up the thread pool."""
    offset, sent_at = 0, time.monotonic()
    while True:
        status = (await run_in_threadpool(Jobs(database).read, job.id)).status
        is_last = status in ENDED_STATUSES or not follow
        while lines := await run_in_threadpool(new_lines, compute, job, offset, is_last):
            offset, sent_at = offset + len(lines), time.monotonic()
            yield "".join(f"data: {line.decode(errors='replace')}\n\n" for line in lines.splitlines())
        if is_last:
            yield f"event: end\ndata: {status}\n\n"
            return
        if time.monotonic() - sent_at >= QUIET_SECONDS:
            sent_at = time.monotonic()
            yield f": {status}\n\n"
        await asyncio.sleep(POLL_SECONDS)


def last_lines(compute: Compute, job: JobKey) -> list[str]:
    """The last lines of a log; the first of them may be cut."""
    start = max(0, compute.log_size(job) - MAX_TAIL_BYTES)
    tail = compute.read_log(job, start, MAX_TAIL_BYTES)
    return tail.decode(errors="replace").splitlines()[-MAX_TAIL_LINES:]


def new_lines(compute: Compute, job: JobKey, offset: int, is_last: bool) -> bytes:
    """The next whole lines of a log; a line that is longer than `MAX_READ_BYTES` comes in parts.

    Each redraw of a progress bar is a line as well. The last read includes a line that has not ended.
    """
    data = compute.read_log(job, offset, MAX_READ_BYTES)
    end = max(data.rfind(b"\n"), data.rfind(b"\r", 0, -1)) + 1  # after a final "\r", the "\n" of the same line may follow
    return data[:end] or (data if is_last or len(data) == MAX_READ_BYTES else b"")
