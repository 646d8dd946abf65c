"""The time that a job may take over all its attempts: `schedule.max_duration` (row G5).

Time in which nothing ran does not count: while it waited, while the stack was down, and what the clock was set by.
"""

import json
import time
from pathlib import Path

from recipes.contracts.job import Job
from recipes.contracts.quantities import parse_duration
from resources.compute.local.work_folder import CLOCK_FILE, TIME_START_FILE
from resources.stack.detached_process import LOG_FILE, write_json_atomic

MIN_CLOCK_CHANGE_SECONDS = 10.0
"""A clock that is set by less changes little of what a job may take."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def start_time(job: Job, work: Path, now: float) -> float:
    """When the time limit of a job that starts at `now` started; `now` again for a job whose time was used up.

    The log shows until when it ran: a stack that was down, or a job that failed yesterday, has used no time since.
    """
    began, log = work / TIME_START_FILE, work / LOG_FILE
    if not began.is_file() or not log.is_file() or is_time_over(job, work):
        return now
    return read_start(work) + max(0.0, now - log.stat().st_mtime)


def record_start(work: Path, start: float) -> None:
    write_json_atomic(work / TIME_START_FILE, start)
    write_json_atomic(work / CLOCK_FILE, {"boot": boot_id(), "offset": clock_offset()})


def read_start(work: Path) -> float:
    return float((work / TIME_START_FILE).read_text())


def is_time_over(job: Job, work: Path) -> bool:
    """Whether a job has used up its time."""
    started = (work / TIME_START_FILE).is_file()
    return started and time.time() > read_start(work) + parse_duration(job.schedule.max_duration)


def follow_clock_change(work: Path) -> None:
    """Move the start of the time limit with the clock: set forward by two hours, it ended jobs that may take one.

    The clock is compared with the last time that a supervisor looked, whichever it was. After a reboot there is nothing to
    compare with.
    """
    if not (work / TIME_START_FILE).is_file():
        return
    offset = clock_offset()
    try:
        last = json.loads((work / CLOCK_FILE).read_text())
    except FileNotFoundError:  # started by an earlier release
        last = {}
    known = last.get("boot") == boot_id()
    change = offset - last["offset"] if known else 0.0
    if known and abs(change) <= MIN_CLOCK_CHANGE_SECONDS:
        return
    record_start(work, read_start(work) + change)


def clock_offset() -> float:
    """How far the clock is ahead of the one that nobody sets."""
    return time.time() - time.monotonic()


def boot_id() -> str:
    """Identifies a boot of this machine: the monotonic clock starts with it."""
    return BOOT_ID.read_text().strip() if BOOT_ID.is_file() else ""
