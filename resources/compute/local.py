"""LocalCompute: a job as a process of this machine, which outlives whoever started it."""

import time
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ValidationError

from recipes.contracts.exit_document import ExitDocument
from recipes.contracts.exit_reason import ExitReason
from recipes.duration import seconds_of
from recipes.job_processes import end_processes
from recipes.schema import EXIT_FILE, MEMORY_RAN_OUT, BadConfiguration, Job, Program
from recipes.store import MANIFEST
from resources.compute.base import GRACE_SECONDS, MAX_RESTARTS, POLL_SECONDS, Compute, Credentials, Observation, Phase
from resources.compute.devices import Devices
from resources.compute.local_command import command, surroundings
from resources.compute.memory_kills import memory_kills
from resources.detached import LOG, ask_to_stop, is_running, lock, start, stop, write_json

CHECKPOINTS = "checkpoints"
"""Where a training has its own, a folder a step, which is whole once it has that name."""
ATTEMPT = "attempt.json"
FAULTS = "faults.json"
"""How many attempts have ended for another reason than that the machine was wanted back."""
LONG_SECONDS = 3600.0
"""An attempt that lasted so long has got on: a run of weeks is killed more often than one that never gets anywhere."""
WAITS = "waits.json"
"""The start that is due as soon as the job gets its GPUs."""
WAITED = "waited"
"""Its time is that of the start that had to wait last."""
BEGAN = "began.json"
"""When the time of a job began, in seconds since 1970, later by as long as nothing ran: a restart gets what was left."""
SET_SECONDS = 10.0
"""A clock that is set by less changes little of what a job may take."""
MEMORY_KILLS = "memory_kills.json"
"""How often the kernel had ended something for want of memory when the attempt began."""


NO_ROOM = "it ended by itself, and found no room to say why: free some space; the end of its log may say more"
KILL_MESSAGES = {
    ExitReason.KILLED: "killed",
    ExitReason.OOM_KILLED: "killed by the kernel, for want of memory",
}


class Start(BaseModel, frozen=True):
    """The next start of a program; of a restart, how the last attempt ended, and how many of them ended by a fault.

    `used` are the seconds that a job had used of its time when it began to wait: waiting uses none, however often a
    supervisor was killed that was about to start it.
    """

    attempt: int
    faults: int
    used: float | None = None
    detail: str = ""
    reason: ExitReason | None = None


class LocalCompute(Compute):
    """Jobs as detached processes.

    Args:
        source: folder in which `recipes` is importable.
        max_restarts: how often a job that was killed, or asks for it, starts again before it counts as failed. One that is
            preempted has done what it could, and is not counted.
        grace_seconds: time between SIGTERM and SIGKILL when a job is cancelled.
        devices: the GPUs that jobs get; none when unset, and then a program takes what it finds.
    """

    def __init__(
        self,
        *,
        source: Path,
        max_restarts: int = MAX_RESTARTS,
        grace_seconds: float = GRACE_SECONDS,
        poll_seconds: float = POLL_SECONDS,
        credentials: Credentials | None = None,
        devices: Devices | None = None,
    ) -> None:
        super().__init__(poll_seconds, credentials)
        self.devices = devices or Devices(Path())
        self.source = source
        self.max_restarts = max_restarts
        self.grace_seconds = grace_seconds
        self._ahead: dict[str, float] = {}

    def submit(self, job: Job) -> None:
        """Raises BadConfiguration: the job asks for more than one machine."""
        if job.distributed and job.distributed.num_nodes > 1:
            raise BadConfiguration(
                f"the job asks for {job.distributed.num_nodes} nodes, this machine is one: set distributed.num_nodes to 1"
            )
        work = Path(job.work_dir)
        work.mkdir(parents=True, exist_ok=True)
        with lock(work) as descriptor:
            # Asked under the lock: a process that ended a moment ago may have done the work.
            if descriptor is not None and not self.result(job) and not (work / WAITS).exists():
                self._start(job, work, descriptor, Start(attempt=1, faults=0))

    def observe(self, job: Job) -> Observation:
        work = Path(job.work_dir)
        self._heed_the_clock(job, work)
        over = is_over(job, work)
        if over and is_running(work):
            self.cancel(job)  # it may save a checkpoint, or end well, in its grace
        with lock(work) as descriptor:
            attempt = read_number(work / ATTEMPT)
            if descriptor is None:
                return Observation(Phase.RUNNING, attempt)
            if self.result(job):
                return Observation(Phase.SUCCEEDED, attempt, reason=ExitReason.COMPLETED)
            if (work / WAITS).exists():
                return self._start(job, work, descriptor, Start.model_validate_json((work / WAITS).read_bytes()))
            if over:
                end_what_is_left(job)
                limit = job.schedule.max_duration
                detail = f"it took longer than schedule.max_duration, {limit}: what it saved stays, give it more time"
                record_exit(work, ExitReason.TIMED_OUT, detail)
                return Observation(Phase.FAILED, attempt, detail, ExitReason.TIMED_OUT)
            ended = read_exit(work) or record_kill(work)
            before = 0 if has_got_on(work) else read_number(work / FAULTS)
            faults = before + ended.reason.counts
            end_what_is_left(job)  # it would compute on GPUs that are another job's by then
            if not ended.reason.restarts or faults > self.max_restarts:
                return Observation(Phase.FAILED, attempt, ended.message, ended.reason)
            begin = Start(attempt=attempt + 1, faults=faults, detail=ended.message, reason=ended.reason)
            return self._start(job, work, descriptor, begin)

    def _heed_the_clock(self, job: Job, work: Path) -> None:
        """Where the clock was set since the last look, the job has used no time by that: set forward by two hours, it ended
        whatever may take one.
        """
        ahead = time.time() - time.monotonic()
        set_by = ahead - self._ahead.get(job.id, ahead)
        self._ahead[job.id] = ahead
        if abs(set_by) > SET_SECONDS and (work / BEGAN).is_file():
            write_json(work / BEGAN, float((work / BEGAN).read_text()) + set_by)

    def cancel(self, job: Job) -> None:
        stop(Path(job.work_dir), self.grace_seconds)
        (Path(job.work_dir) / WAITS).unlink(missing_ok=True)
        self.devices.forget(job)
        end_what_is_left(job)

    def waited_until(self, work_dir: str) -> int:
        if (Path(work_dir) / WAITS).exists():
            return time.time_ns() // 1_000_000
        waited = Path(work_dir) / WAITED
        return waited.stat().st_mtime_ns // 1_000_000 if waited.exists() else 0

    def is_left(self, work_dir: str) -> bool:
        return is_running(Path(work_dir))

    def end_left(self, work_dir: str) -> None:
        ask_to_stop(Path(work_dir), self.grace_seconds)

    def log(self, job: Job, offset: int) -> tuple[str, int]:
        path = Path(job.work_dir) / LOG
        if not path.is_file():
            return "", 0
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        return whole.decode(errors="replace"), offset + len(whole)

    def _start(self, job: Job, work: Path, descriptor: int, begin: Start) -> Observation:
        """Start the program, or let it wait for its GPUs: who looks next tries again. Nothing changes where this raises."""
        waits, now = work / WAITS, time.time()
        with self.devices.take(job) as granted:
            if granted is None:
                if not waits.exists():
                    used = now - float((work / BEGAN).read_text()) if begin.attempt > 1 else None
                    write_json(waits, begin.model_copy(update={"used": used}).model_dump())
                detail = "; ".join(filter(None, (self.devices.words(job), begin.detail)))
                return Observation(Phase.PENDING, begin.attempt, detail, begin.reason)
            # First: where the metadata is away, this has not been a start.
            env = {**surroundings(job), **self.credentials.issue(job), **granted.variables}
            if begin.attempt == 1:
                write_json(work / BEGAN, beginning(job, work, now))
            elif begin.used is not None:
                write_json(work / BEGAN, now - begin.used)
            write_json(work / FAULTS, begin.faults)
            if waits.exists():
                (work / WAITED).touch()
                waits.unlink()
            (work / EXIT_FILE).unlink(missing_ok=True)
            write_json(work / ATTEMPT, begin.attempt)
            write_json(work / MEMORY_KILLS, memory_kills())
            job_file = work / "job.json"
            write_json(job_file, job.model_dump(mode="json"))
            start(command(job, job_file), work, descriptor, cwd=self.source, env=env, besides=granted.locks)
        phase = Phase.RESTARTING if begin.attempt > 1 else Phase.RUNNING
        return Observation(phase, begin.attempt, begin.detail, begin.reason)


def has_got_on(work: Path) -> bool:
    """Whether the newest attempt has: a run that saves is killed as often as somebody likes, and ends all the same."""
    saved = [file.stat().st_mtime for file in (work / CHECKPOINTS).rglob(MANIFEST) if file.parent.name.isdigit()]
    return lasted(work) > LONG_SECONDS or (bool(saved) and max(saved) > (work / ATTEMPT).stat().st_mtime)


def lasted(work: Path) -> float:
    """Seconds from the start of the newest attempt to what it said last."""
    log = work / LOG
    return log.stat().st_mtime - (work / ATTEMPT).stat().st_mtime if log.is_file() else 0.0


def record_kill(work: Path) -> ExitDocument:
    """The exit document of an attempt that was killed before it could write one. After OOM, recovery is asked for."""
    counted = work / MEMORY_KILLS
    if not counted.is_file() or memory_kills() <= int(counted.read_text()):
        return record_exit(work, ExitReason.KILLED, KILL_MESSAGES[ExitReason.KILLED])
    (work / MEMORY_RAN_OUT).touch()
    return record_exit(work, ExitReason.OOM_KILLED, KILL_MESSAGES[ExitReason.OOM_KILLED])


def record_exit(work: Path, reason: ExitReason, message: str) -> ExitDocument:
    """Write why the supervisor counts the newest attempt as ended. On a full disk the answer alone has it."""
    document = ExitDocument(code=None, message=message, reason=reason)
    with suppress(OSError):
        write_json(work / EXIT_FILE, document.model_dump(mode="json"))
    return document


def end_what_is_left(job: Job) -> None:
    """Processes of a command that were not ended with its program, because that was killed."""
    if job.program is Program.COMMAND:
        end_processes(job.id)


def beginning(job: Job, work: Path, now: float) -> float:
    """When the time of a job that starts at `now` began. Who submits again what had used it up gives it once more.

    What it did last is in its log: a stack that was down, or a job that failed yesterday, has used no time since.
    """
    began, log = work / BEGAN, work / LOG
    if not began.is_file() or not log.is_file() or is_over(job, work):
        return now
    return float(began.read_text()) + max(0.0, now - log.stat().st_mtime)


def is_over(job: Job, work: Path) -> bool:
    """Whether a job has used up the time that it may take (row G5)."""
    path = work / BEGAN
    return path.is_file() and time.time() > float(path.read_text()) + seconds_of(job.schedule.max_duration)


def read_number(path: Path) -> int:
    return int(path.read_text()) if path.is_file() else 0


def read_exit(work: Path) -> ExitDocument | None:
    """How the newest attempt ended; None where it was killed before it could write that down."""
    try:
        return ExitDocument.model_validate_json((work / EXIT_FILE).read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError:
        return ExitDocument(code=None, message=NO_ROOM, reason=ExitReason.UNKNOWN)
