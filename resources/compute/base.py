"""Compute backend interface: submit, observe, cancel and read logs of a job."""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Protocol

from pydantic import ValidationError

from recipes.contracts.exit_reason import ExitReason
from recipes.contracts.job import BadConfiguration, Job, Program, Result
from recipes.contracts.quantities import pluralize
from recipes.storage.artifact_store import Store
from resources.compute.credentials import Credentials, NoCredentials
from resources.object_store.program_scope import is_base_model, is_within

PROGRAM_ENVIRONMENT = {
    "PYTHONUTF8": "1",  # libraries read and write files in the encoding of the locale
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Threads that spin while they wait lose most of their time on a machine that does other work too; threads that sleep at
    # once are woken thousands of times a second: 49,000 context switches against 5,000, and a tenth of a step.
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "10000",
}


class JobKey(Protocol):
    """What identifies a job to a backend. A `Job`, a `JobRecord` and a `JobRef` are such keys."""

    @property
    def id(self) -> str: ...

    @property
    def program(self) -> Program: ...


@dataclass(frozen=True)
class JobRef:
    """A job key, where only the id is at hand. The program is part of it: equal ids of two programs are two jobs."""

    id: str
    program: Program


# The contract of a compute backend: submit, observe, cancel, read the log; and `run`, the one way to run a job.
#
# Every call names a job by id and program, never by a path. Phases that only a cluster has (pending, suspended,
# preempted) are part of the contract, so nothing above knows where a job runs. A backend keeps all state outside the
# supervisor, which may be killed and restarted at any moment.

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2
MAX_LINES_PER_POLL = 200
"""Each line becomes a Dagster event, which takes up to 40 ms: a script that printed 100,000 lines in two seconds otherwise
kept its run busy for over an hour.
"""
MAX_LINE_CHARACTERS = 10_000
LINE_SEARCH_BYTES = 65_536
"""Read at a time to find the last end of a line: the log of weeks is not read whole for it."""
GRACE_SECONDS = 300
"""Time from SIGTERM to SIGKILL (row J3)."""
SHUTDOWN_SECONDS = 270
"""Grace period that torchrun gives its processes: shorter than `GRACE_SECONDS`, so that torchrun can exit cleanly too."""
CREDENTIALS_RENEWAL_SECONDS = 3600.0
"""Interval at which a supervisor renews its job's credentials: a fraction of what a job may take."""

STORE_OUTAGE_SECONDS = 3600.0
"""How long polling may fail before the supervisor gives up: the program keeps running while the object store, metadata or
Dagster's database are unavailable."""
RETRY_SECONDS = 1.0
"""Pause after a failed poll."""


class Phase(StrEnum):
    """State of a job."""

    PENDING = "pending"  # not admitted: waits for capacity
    STARTING = "starting"  # admitted, and its first attempt has not begun
    SUSPENDED = "suspended"  # had to give its nodes back; will be resumed
    RUNNING = "running"
    RESTARTING = "restarting"  # killed or preempted; resumes from its last checkpoint
    SUCCEEDED = "succeeded"
    FAILED = "failed"


ENDED_PHASES = frozenset({Phase.SUCCEEDED, Phase.FAILED})


@dataclass(frozen=True)
class Observation:
    """State of a job at one poll. `attempt` counts its starts from 1; `detail` is one line for people.

    `reason` is why the newest attempt that has ended did: of a failed job always known.
    """

    phase: Phase
    attempt: int
    detail: str = ""
    reason: ExitReason | None = None


@dataclass(frozen=True)
class Follower:
    """Callbacks while a job runs: for each new line of its log, and for each change of its state.

    `whole_log`: lines that were logged before it attached are new to it too.

    `is_cancelled` is asked when the supervisor is interrupted: whether the job is to end too. A supervisor whose pod is
    evicted is interrupted just as one whose run is cancelled.
    """

    line: Callable[[str], None]
    phase: Callable[[Observation], None]
    is_cancelled: Callable[[], bool] = lambda: True
    whole_log: bool = False


class JobFailed(Exception):
    """The program ended without a result and will not be restarted. `reason` decides whether the work is tried again."""

    def __init__(self, message: str, reason: ExitReason = ExitReason.PROGRAM_ERROR) -> None:
        super().__init__(message)
        self.reason = reason


class Compute(ABC):
    """A compute backend. Implementations keep no state in memory that a restarted supervisor would miss."""

    queues_jobs: ClassVar[bool] = False
    """Whether submitted jobs wait in a queue of the backend. Their supervisors then start at admission, not before."""

    def __init__(self, poll_seconds: float = POLL_SECONDS, credentials: Credentials | None = None) -> None:
        self.poll_seconds = poll_seconds
        self.credentials: Credentials = credentials or NoCredentials()
        self._reported_ends: list[JobKey] = []

    @abstractmethod
    def submit(self, job: Job) -> None:
        """Start the job, or attach when a job with its key exists (idempotent). Its next attempt uses this document."""

    @abstractmethod
    def observe(self, job: JobKey) -> Observation:
        """Return the state of a submitted job. Restarts its program where that is allowed."""

    def observe_submitted(self, jobs: Sequence[JobKey]) -> list[Observation | None]:
        """Return the state of each job. None: it is not submitted, or has ended and its end was reported."""

        def find(job: JobKey) -> Observation | None:
            try:
                return self.observe(job)
            except FileNotFoundError:
                return None

        return [find(job) for job in jobs]

    @abstractmethod
    def cancel(self, job: JobKey) -> None:
        """End the job within its grace period; it may save a checkpoint first."""

    @abstractmethod
    def read_log(self, job: JobKey, offset: int, max_bytes: int | None = None) -> bytes:
        """Read the log over all attempts from byte `offset` on; empty where there is nothing (yet)."""

    @abstractmethod
    def log_size(self, job: JobKey) -> int:
        """Bytes of the log over all attempts."""

    @abstractmethod
    def has_processes(self, job: JobKey) -> bool:
        """Whether a program of the job runs, even if its supervisor is gone."""

    @abstractmethod
    def terminate_processes(self, job: JobKey) -> None:
        """Ask the job's program to end, without waiting. Called again after its grace period, it kills the program."""

    @abstractmethod
    def queued_until(self, job: JobKey) -> int:
        """When the job last stopped waiting for capacity, in ms since 1970: now while it waits, 0 if it never did."""

    def acknowledge_end(self, job: JobKey) -> None:  # noqa: B027 - only a backend whose jobs end unwatched needs it
        """Note that the end of the job was recorded by its supervisor: the next `submit` starts it again. Idempotent."""

    def acknowledge_ends(self) -> None:
        """Acknowledge the ends of all jobs that `run` reported in this process; call it once they are recorded.

        A supervisor that is killed earlier is replaced by one that attaches, and is given the same end.
        """
        while self._reported_ends:
            self.acknowledge_end(self._reported_ends[-1])
            self._reported_ends.pop()

    def list_unfinished(self) -> Sequence[JobKey]:
        """All programs that have not ended, where the backend knows that at once: with or without a supervisor."""
        return ()

    def read_lines(self, job: JobKey, offset: int) -> tuple[str, int]:
        """Read whole lines of the log from byte `offset` on. Returns them and the next offset."""
        offset = min(offset, self.log_size(job))  # its work folder may have been deleted meanwhile
        data = self.read_log(job, offset)
        whole = data[: data.rfind(b"\n") + 1]
        return whole.decode(errors="replace"), offset + len(whole)

    def last_line_end(self, job: JobKey) -> int:
        """Where the last whole line of the log ends."""
        end = self.log_size(job)
        while end > 0:
            start = max(0, end - LINE_SEARCH_BYTES)
            if (found := self.read_log(job, start, end - start).rfind(b"\n")) >= 0:
                return start + found + 1
            end = start
        return 0

    def result(self, job: Job) -> Result | None:
        """The job's result once it has succeeded; None for the result of different work under the same id."""
        return read_result(Store(job.store), job)

    def run(self, job: Job, follower: Follower) -> Result:
        """Run the job to its end, or attach to it where an earlier supervisor was interrupted.

        Finished work is not repeated: a job whose result exists returns it.

        Raises:
            BadConfiguration: the program refused its input; the message says what to do.
            JobFailed: it ended otherwise without a result; its `reason` says why.
        """
        if done := self.result(job):
            follower.line(f"{job.program} {job.id} was done before")
            self._reported_ends.append(job)
            self.credentials.revoke(job)
            return done
        offset = 0 if follower.whole_log else self.last_line_end(job)
        self.submit(job)
        progress = Progress(offset)
        last_poll = time.monotonic()
        try:
            while True:
                try:
                    done = self._poll(job, follower, progress)
                except (BadConfiguration, JobFailed):
                    raise
                except Exception as error:
                    # The supervisor failed, not the program: a short outage must not end a training of weeks.
                    if time.monotonic() - last_poll > STORE_OUTAGE_SECONDS:
                        raise
                    log.warning("cannot poll %s %s, will retry: %r", job.program, job.id, error)
                    time.sleep(RETRY_SECONDS)
                    continue
                if done:
                    return done
                last_poll = time.monotonic()
                time.sleep(self.poll_seconds)
        except (BadConfiguration, JobFailed):
            raise
        except BaseException:
            # Dagster cancels a run by raising an exception in its worker.
            if not self.queues_jobs or follower.is_cancelled():
                self.cancel(job)
                self.credentials.revoke(job)
            raise

    def _poll(self, job: Job, follower: Follower, progress: "Progress") -> Result | None:
        """Report new lines and a changed phase; returns the result once there is one. Raises as `run` does on failure."""
        if time.monotonic() - progress.renewed_at > CREDENTIALS_RENEWAL_SECONDS:
            self.credentials.renew(job)
            progress.renewed_at = time.monotonic()
        observation = self.observe(job)
        text, progress.offset = self.read_lines(job, progress.offset)
        for line in truncate_lines(text.splitlines(), job.id):
            follower.line(line)
        if observation != progress.observation:
            follower.phase(observation)
            progress.observation = observation
        done = self.result(job) if observation.phase is Phase.SUCCEEDED else None
        if observation.phase in ENDED_PHASES:
            self._reported_ends.append(job)
            self.credentials.revoke(job)
        if observation.phase is Phase.FAILED:
            raise failure(job, observation)
        if observation.phase is Phase.SUCCEEDED and not done:
            raise JobFailed(f"{job.program} {job.id} ended without a result at {job.result_uri}", ExitReason.UNKNOWN)
        return done


def read_result(store: Store, job: Job) -> Result | None:
    """The result that a job left in a store.

    None for the result of different work under the same id, and for one that claims what is not the job's: whatever it
    names is deployed, and deleted, as the job's own.
    """
    try:
        result = Result.model_validate_json(store.get_bytes(job.result_uri))
    except (FileNotFoundError, ValidationError):
        return None
    if result.work_digest != job.work_digest:
        return None
    if claimed := find_foreign_uri(job, result):
        log.warning("the result of %s %s is not accepted: %s is no output of the job", job.program, job.id, claimed)
        return None
    return result


def find_foreign_uri(job: Job, result: Result) -> str | None:
    """Where an artifact of a result lies that is no output of the job. Base models are shared, and known by their hash."""
    places = [uri.rstrip("/") for uri in job.outputs.values()]
    for artifact in result.artifacts.values():
        is_output = any(is_within(artifact.uri, place) for place in places)
        if not is_output and not is_base_model(artifact.uri):
            return artifact.uri
    return None


def truncate_lines(lines: Sequence[str], job_id: str) -> Iterator[str]:
    """Limit the number and length of lines per poll. The log itself keeps all of it."""
    if len(lines) > MAX_LINES_PER_POLL:
        yield f"... {pluralize(len(lines) - MAX_LINES_PER_POLL, 'line')} more: see `hanzo-ml job logs {job_id}`"
    for line in lines[-MAX_LINES_PER_POLL:]:
        excess = len(line) - MAX_LINE_CHARACTERS
        yield line[:MAX_LINE_CHARACTERS] + (f"... {pluralize(excess, 'character')} more" if excess > 0 else "")


@dataclass
class Progress:
    """What a supervisor has reported of its job so far, and when it last renewed the credentials."""

    offset: int
    observation: Observation | None = None
    renewed_at: float = field(default_factory=time.monotonic)


def failure(job: Job, observation: Observation) -> Exception:
    """The error that a failed job means to the user: what to correct, or how often it was tried and why it ended."""
    reason = observation.reason or ExitReason.UNKNOWN
    if reason is ExitReason.BAD_CONFIGURATION:
        return BadConfiguration(observation.detail)
    attempts = pluralize(observation.attempt, "attempt")
    return JobFailed(f"{job.program} {job.id} failed after {attempts}: {observation.detail}", reason)
