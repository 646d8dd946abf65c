"""Work folder of a job: its files and its time limit."""

import json
import time
from pathlib import Path

from recipes.contracts.job import EXIT_FILE, Job, Program
from recipes.contracts.quantities import parse_duration
from resources.compute.base import JobKey
from resources.stack.detached_process import LOG_FILE, write_json_atomic

# Files with which the local backend keeps its state in the work folder. The names must not change: folders of earlier
# releases must remain readable.

JOB_FILE = "job.json"
"""The document that the next attempt of the program reads."""
ATTEMPT_FILE = "attempt.json"
FAILED_ATTEMPTS_FILE = "faults.json"
"""Number of attempts that ended for another reason than preemption."""
QUEUED_START_FILE = "waits.json"
"""The start that is due as soon as the job is admitted."""
QUEUED_UNTIL_FILE = "waited"
"""Its modification time is when the job was last admitted after waiting."""
TIME_START_FILE = "began.json"
"""When the job's time limit started, in seconds since 1970, moved forward by the time in which nothing ran."""
CLOCK_FILE = "clock.json"
"""Offset of the wall clock when the time limit started, to detect when the clock is set."""
MEMORY_KILLS_FILE = "memory_kills.json"
"""The kernel's count of out-of-memory kills when the attempt started."""
CHECKPOINTS_FOLDER = "checkpoints"
"""Local checkpoints of a training, one folder per step; a complete one has its final name and a manifest."""


def work_folder(jobs: Path, job: JobKey) -> Path:
    """Return the folder of a job's program below `jobs`.

    Programs that belong to a submitted job share its folder: `evaluate-ID` and `convert-ID` work in the folder of ID. Those
    derived from a dataset version, whose id starts with the program's name, have their own folder.
    """
    prefix = f"{job.program}-".replace("_", "-")
    if job.program in (Program.EVALUATE, Program.CONVERT):
        return jobs / job.id.removeprefix(prefix) / job.program
    is_derived = job.program in (Program.SPLIT, Program.VALIDATE, Program.FIND_LEAKS) or (
        job.program is Program.PREPARE and job.id.startswith(prefix)
    )
    return jobs / job.id if is_derived else jobs / job.id / job.program


def read_number(path: Path) -> int:
    return int(path.read_text(encoding="utf-8")) if path.is_file() else 0


def last_sign(work: Path) -> float:
    """Return when the program last wrote here, in seconds since 1970; 0 if never."""
    files = (work / LOG_FILE, work / ATTEMPT_FILE, work / EXIT_FILE)
    return max((file.stat().st_mtime for file in files if file.is_file()), default=0.0)


# Time limit of a job over all its attempts: `schedule.max_duration`.
#
# Time in which nothing ran does not count: waiting, downtime of the stack, and changes of the wall clock.

MIN_CLOCK_CHANGE_SECONDS = 10.0
"""Smaller changes of the wall clock are ignored: they matter little for a job's time limit."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def start_time(job: Job, work: Path, now: float) -> float:
    """Return when the time limit of a job starting at `now` began.

    `now` if its time was used up. The log shows when it last ran: downtime of the stack, or the time since a job failed,
    uses none of the limit.
    """
    began, log = work / TIME_START_FILE, work / LOG_FILE
    if not began.is_file() or not log.is_file() or is_time_over(job, work):
        return now
    return read_start(work) + max(0.0, now - log.stat().st_mtime)


def record_start(work: Path, start: float) -> None:
    write_json_atomic(work / TIME_START_FILE, start)
    write_json_atomic(work / CLOCK_FILE, {"boot": boot_id(), "offset": clock_offset()})


def read_start(work: Path) -> float:
    return float((work / TIME_START_FILE).read_text(encoding="utf-8"))


def is_time_over(job: Job, work: Path) -> bool:
    """Return whether a job has used up its time."""
    started = (work / TIME_START_FILE).is_file()
    return started and time.time() > read_start(work) + parse_duration(job.schedule.max_duration)


def follow_clock_change(work: Path) -> None:
    """Move the start of the time limit along with a changed wall clock.

    A clock that was set forward by two hours ended jobs with a limit of one hour. The clock is compared with its offset at
    the last poll of any supervisor; after a reboot there is nothing to compare with.
    """
    if not (work / TIME_START_FILE).is_file():
        return
    offset = clock_offset()
    try:
        last = json.loads((work / CLOCK_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:  # started by an earlier release
        last = {}
    known = last.get("boot") == boot_id()
    change = offset - last["offset"] if known else 0.0
    if known and abs(change) <= MIN_CLOCK_CHANGE_SECONDS:
        return
    record_start(work, read_start(work) + change)


def clock_offset() -> float:
    """Return how far the wall clock is ahead of the monotonic clock."""
    return time.time() - time.monotonic()


def boot_id() -> str:
    """Return the id of this machine's boot, at which the monotonic clock starts."""
    return BOOT_ID.read_text(encoding="utf-8").strip() if BOOT_ID.is_file() else ""
