"""Restarts of a job's program: how an attempt ended, and whether another one follows."""

from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel

from recipes.contracts.exit_reason import ExitDocument, ExitReason
from recipes.contracts.job import EXIT_FILE, OUT_OF_MEMORY_FILE
from recipes.storage.artifact_store import MANIFEST_FILE
from resources.compute.local.work_folder import (
    ATTEMPT_FILE,
    CHECKPOINTS_FOLDER,
    FAILED_ATTEMPTS_FILE,
    MEMORY_KILLS_FILE,
    read_number,
)
from resources.stack.detached_process import LOG_FILE, write_json_atomic

PROGRESS_SECONDS = 3600.0
"""An attempt that ran for so long made progress: a run of weeks is killed more often than one that never gets anywhere."""


class Start(BaseModel, frozen=True):
    """The next attempt; of a restart, how the last attempt ended, and how many attempts ended by a fault.

    `used` are the seconds of its time limit that a job had used when it began to wait: waiting uses none, however many
    supervisors were killed while they were starting it.
    """

    attempt: int
    faults: int
    used: float | None = None
    detail: str = ""
    reason: ExitReason | None = None


def made_progress(work: Path) -> bool:
    """Whether the last attempt did: a run that saves checkpoints may be killed any number of times and still completes."""
    manifests = (work / CHECKPOINTS_FOLDER).rglob(MANIFEST_FILE)
    saved = [file.stat().st_mtime for file in manifests if file.parent.name.isdigit()]
    ran_long = attempt_seconds(work) > PROGRESS_SECONDS
    return ran_long or (bool(saved) and max(saved) > (work / ATTEMPT_FILE).stat().st_mtime)


def next_start(ended: ExitDocument, attempt: int, work: Path, max_restarts: int) -> Start | None:
    """The start that follows an ended attempt; None where the job has failed.

    The exit reason decides, and how many attempts were counted since the last one that made progress.
    """
    before = 0 if made_progress(work) else read_number(work / FAILED_ATTEMPTS_FILE)
    faults = before + ended.reason.counts
    if not ended.reason.restarts or faults > max_restarts:
        return None
    return Start(attempt=attempt + 1, faults=faults, detail=ended.message, reason=ended.reason)


def attempt_seconds(work: Path) -> float:
    """Seconds from the start of the last attempt to the last line of its log."""
    log = work / LOG_FILE
    return log.stat().st_mtime - (work / ATTEMPT_FILE).stat().st_mtime if log.is_file() else 0.0


# The kernel counts the processes that it killed because memory ran out, on the whole machine and also for a cgroup's limit:
# evidence only about a process that was killed without writing an exit reason.

VMSTAT = Path("/proc/vmstat")


def memory_kills(vmstat: Path = VMSTAT) -> int:
    """Number of out-of-memory kills since boot; 0 where the kernel does not report it (before Linux 4.13)."""
    counts = dict(line.split() for line in vmstat.read_text(encoding="utf-8").splitlines()) if vmstat.is_file() else {}
    return int(counts.get("oom_kill", 0))


KILL_MESSAGES = {
    ExitReason.KILLED: "killed",
    ExitReason.OOM_KILLED: "killed by the kernel, for want of memory",
}


def record_memory_kills(work: Path) -> None:
    """Note the kernel's count as an attempt starts, so that a kill during it can be told from earlier ones."""
    write_json_atomic(work / MEMORY_KILLS_FILE, memory_kills())


def record_kill(work: Path) -> ExitDocument:
    """The exit document of an attempt that was killed before it could write one. After OOM, recovery is asked for."""
    counted = work / MEMORY_KILLS_FILE
    if not counted.is_file() or memory_kills() <= int(counted.read_text(encoding="utf-8")):
        return record_exit(work, ExitReason.KILLED, KILL_MESSAGES[ExitReason.KILLED])
    (work / OUT_OF_MEMORY_FILE).touch()
    return record_exit(work, ExitReason.OOM_KILLED, KILL_MESSAGES[ExitReason.OOM_KILLED])


def record_exit(work: Path, reason: ExitReason, message: str) -> ExitDocument:
    """Write why the supervisor counts the newest attempt as ended. On a full disk the answer alone has it."""
    document = ExitDocument(code=None, message=message, reason=reason)
    with suppress(OSError):
        write_json_atomic(work / EXIT_FILE, document.model_dump(mode="json"))
    return document
