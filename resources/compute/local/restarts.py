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
"""An attempt of this length counts as progress, because a run of weeks may be killed many times."""


class Start(BaseModel, frozen=True):
    """The next attempt, the number of counted faults, and how the last attempt ended.

    `used` is how many seconds of its time limit a job had used when it began to wait. Waiting uses none, even if supervisors
    are killed while they start the job.
    """

    attempt: int
    faults: int
    used: float | None = None
    detail: str = ""
    reason: ExitReason | None = None


def made_progress(work: Path) -> bool:
    """Return whether the last attempt saved a checkpoint or ran long.

    A run that saves checkpoints may be killed any number of times and still completes.
    """
    manifests = (work / CHECKPOINTS_FOLDER).rglob(MANIFEST_FILE)
    saved = [file.stat().st_mtime for file in manifests if file.parent.name.isdigit()]
    ran_long = attempt_seconds(work) > PROGRESS_SECONDS
    return ran_long or (bool(saved) and max(saved) > (work / ATTEMPT_FILE).stat().st_mtime)


def next_start(ended: ExitDocument, attempt: int, work: Path, max_restarts: int) -> Start | None:
    """Return the start that follows an ended attempt; None if the job has failed.

    Decided by the exit reason and the number of counted attempts since the last one that made progress.
    """
    before = 0 if made_progress(work) else read_number(work / FAILED_ATTEMPTS_FILE)
    faults = before + ended.reason.counts
    if not ended.reason.restarts or faults > max_restarts:
        return None
    return Start(attempt=attempt + 1, faults=faults, detail=ended.message, reason=ended.reason)


def attempt_seconds(work: Path) -> float:
    """Return the seconds from the start of the last attempt to its last log line."""
    log = work / LOG_FILE
    return log.stat().st_mtime - (work / ATTEMPT_FILE).stat().st_mtime if log.is_file() else 0.0


# The kernel counts its out-of-memory kills for the whole machine, cgroup limits included: evidence only about a process
# that was killed without writing an exit reason.

VMSTAT = Path("/proc/vmstat")


def memory_kills(vmstat: Path = VMSTAT) -> int:
    """Return the number of out-of-memory kills since boot.

    0 if the kernel does not report it (before Linux 4.13).
    """
    counts = dict(line.split() for line in vmstat.read_text(encoding="utf-8").splitlines()) if vmstat.is_file() else {}
    return int(counts.get("oom_kill", 0))


KILL_MESSAGES = {
    ExitReason.KILLED: "killed",
    ExitReason.OOM_KILLED: "killed by the kernel for lack of memory",
}


def record_memory_kills(work: Path) -> None:
    """Record the kernel's count at the start of an attempt, to recognize later kills."""
    write_json_atomic(work / MEMORY_KILLS_FILE, memory_kills())


def record_kill(work: Path) -> ExitDocument:
    """Write the exit document of an attempt that was killed before it could.

    After an OOM kill, also request recovery.
    """
    counted = work / MEMORY_KILLS_FILE
    if not counted.is_file() or memory_kills() <= int(counted.read_text(encoding="utf-8")):
        return record_exit(work, ExitReason.KILLED, KILL_MESSAGES[ExitReason.KILLED])
    (work / OUT_OF_MEMORY_FILE).touch()
    return record_exit(work, ExitReason.OOM_KILLED, KILL_MESSAGES[ExitReason.OOM_KILLED])


def record_exit(work: Path, reason: ExitReason, message: str) -> ExitDocument:
    """Write and return why the supervisor counts the newest attempt as ended.

    On a full disk it is only returned.
    """
    document = ExitDocument(code=None, message=message, reason=reason)
    with suppress(OSError):
        write_json_atomic(work / EXIT_FILE, document.model_dump(mode="json"))
    return document
