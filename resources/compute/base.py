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
    # Threads that spin while waiting lose most of their time on a machine with other load; threads that sleep immediately
    # are woken thousands of times a second: 49,000 context switches instead of 5,000, and a tenth of the step time.
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "10000",
}


class JobKey(Protocol):
    """Key of a job, implemented by `Job`, `JobRecord` and `JobRef`."""

    @property
    def id(self) -> str: ...

    @property
    def program(self) -> Program: ...


@dataclass(frozen=True)
class JobRef:
    """A job key without the job document.

    The program is part of the key: the same id with two programs is two jobs.
    """

    id: str
    program: Program


# The contract of a compute backend: submit, observe, cancel, read the log; and `run`, the only way to run a job.
#
# Every call identifies a job by id and program, never by a path. Phases that only a cluster has (pending, suspended,
# preempted) are part of the contract, so that callers need not know where a job runs. A backend keeps all state outside
# the supervisor, which may be killed and restarted at any moment.

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2
MAX_LINES_PER_POLL = 200
"""Each line becomes a Dagster event, which takes up to 40 ms: without a limit, a script that printed 100,000 lines in two
seconds kept its run busy for over an hour.
"""
MAX_LINE_CHARACTERS = 10_000
LINE_SEARCH_BYTES = 65_536
"""Block size of the backward search for the last line end, so that a log of weeks is not read whole."""
GRACE_SECONDS = 300
"""Time from SIGTERM to SIGKILL."""
SHUTDOWN_SECONDS = 270
"""Grace period that torchrun gives its processes: shorter than `GRACE_SECONDS`, so that torchrun can exit cleanly too."""
CREDENTIALS_RENEWAL_SECONDS = 3600.0
"""Interval at which a supervisor renews its job's credentials: a fraction of their validity."""

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
    """State of a job at one poll.

    `attempt` counts its starts from 1; `detail` is one line for people. `reason` is the exit reason of the newest ended
    attempt, always set for a failed job.
    """

    phase: Phase
    attempt: int
    detail: str = ""
    reason: ExitReason | None = None


@dataclass(frozen=True)
class Follower:
    """Callbacks for each new log line and each state change of a job.

    `whole_log`: also report lines that were logged before the supervisor attached.

    `is_cancelled` is called when the supervisor is interrupted and returns whether the job must end too: a supervisor is
    interrupted in the same way when its pod is evicted and when its run is cancelled.
    """

    line: Callable[[str], None]
    phase: Callable[[Observation], None]
    is_cancelled: Callable[[], bool] = lambda: True
    whole_log: bool = False


class JobFailed(Exception):
    """The program ended without a result and will not be restarted.

    `reason` decides whether the run is retried.
    """

    def __init__(self, message: str, reason: ExitReason = ExitReason.PROGRAM_ERROR) -> None:
        super().__init__(message)
        self.reason = reason


class Compute(ABC):
    """A compute backend. Implementations keep no state in memory that a restarted supervisor would miss."""

    queues_jobs: ClassVar[bool] = False
    """Whether submitted jobs wait in a queue of the backend. If so, their supervisors start at admission, not before."""

    def __init__(self, poll_seconds: float = POLL_SECONDS, credentials: Credentials | None = None) -> None:
        self.poll_seconds = poll_seconds
        self.credentials: Credentials = credentials or NoCredentials()
        self._reported_ends: list[JobKey] = []

    @abstractmethod
    def submit(self, job: Job) -> None:
        """Start the job, or attach if one with its key exists (idempotent).

        The next attempt uses this document.
        """

    @abstractmethod
    def observe(self, job: JobKey) -> Observation:
        """Return the state of a submitted job; restart its program if allowed."""

    def observe_submitted(self, jobs: Sequence[JobKey]) -> list[Observation | None]:
        """Return the state of each job.

        None: it was not submitted, or it has ended and its end was reported.
        """

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
        """Read the log of all attempts from byte `offset`; empty if there is none yet."""

    @abstractmethod
    def log_size(self, job: JobKey) -> int:
        """Return the size in bytes of the log of all attempts."""

    @abstractmethod
    def has_processes(self, job: JobKey) -> bool:
        """Return whether a program of the job runs, even if its supervisor is gone."""

    @abstractmethod
    def terminate_processes(self, job: JobKey) -> None:
        """Ask the job's program to end, without waiting.

        Called again after the grace period, kill the program.
        """

    @abstractmethod
    def queued_until(self, job: JobKey) -> int:
        """Return when the job last stopped waiting for capacity, in ms since 1970.

        The current time while it waits, 0 if it never waited.
        """

    def acknowledge_end(self, job: JobKey) -> None:  # noqa: B027 - only a backend whose jobs end unwatched needs it
        """Record that the supervisor has stored the end of the job (idempotent).

        The next `submit` starts the job again.
        """

    def acknowledge_ends(self) -> None:
        """Acknowledge the ends of all jobs that `run` reported in this process.

        Call it once they are stored: if the supervisor is killed before, its replacement attaches and gets the same end.
        """
        while self._reported_ends:
            self.acknowledge_end(self._reported_ends[-1])
            self._reported_ends.pop()

    def list_unfinished(self) -> Sequence[JobKey]:
        """List all programs that have not ended, with or without a supervisor.

        Empty for a backend that cannot list them cheaply.
        """
        return ()

    def read_lines(self, job: JobKey, offset: int) -> tuple[str, int]:
        """Read whole lines of the log from byte `offset`; return them and the next offset."""
        offset = min(offset, self.log_size(job))  # its work folder may have been deleted since
        data = self.read_log(job, offset)
        whole = data[: data.rfind(b"\n") + 1]
        return whole.decode(errors="replace"), offset + len(whole)

    def last_line_end(self, job: JobKey) -> int:
        """Return the offset at which the last whole line of the log ends."""
        end = self.log_size(job)
        while end > 0:
            start = max(0, end - LINE_SEARCH_BYTES)
            if (found := self.read_log(job, start, end - start).rfind(b"\n")) >= 0:
                return start + found + 1
            end = start
        return 0

    def result(self, job: Job) -> Result | None:
        """Return the job's result once it has succeeded.

        None for a result of different work under the same id.
        """
        return read_result(Store(job.store), job)

    def run(self, job: Job, follower: Follower) -> Result:
        """Run the job to its end, or attach if an earlier supervisor was interrupted.

        Finished work is not repeated: if the job's result exists, it is returned.

        Raises:
            BadConfiguration: the program refused its input; the message says what to do.
            JobFailed: it ended without a result for another reason, given by `reason`.
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
                    # The supervisor failed, not the program: a short outage must not end a week-long training.
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
        """Report new lines and a changed phase; return the result once there is one.

        Raises like `run` if the job failed.
        """
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
    """Return the result that a job wrote to a store.

    None for a result of different work under the same id, and for one that lists artifacts outside the job's outputs:
    every listed artifact is deployed, and deleted, as the job's own.
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
    """Return the URI of a result's artifact that is no output of the job.

    Base models are allowed: they are shared and identified by their hash.
    """
    places = [uri.rstrip("/") for uri in job.outputs.values()]
    for artifact in result.artifacts.values():
        is_output = any(is_within(artifact.uri, place) for place in places)
        if not is_output and not is_base_model(artifact.uri):
            return artifact.uri
    return None


def truncate_lines(lines: Sequence[str], job_id: str) -> Iterator[str]:
    """Limit the number and length of lines per poll; the log itself is complete."""
    if len(lines) > MAX_LINES_PER_POLL:
        yield f"... {pluralize(len(lines) - MAX_LINES_PER_POLL, 'line')} more: see `hanzo-ml job logs {job_id}`"
    for line in lines[-MAX_LINES_PER_POLL:]:
        excess = len(line) - MAX_LINE_CHARACTERS
        yield line[:MAX_LINE_CHARACTERS] + (f"... {pluralize(excess, 'character')} more" if excess > 0 else "")


@dataclass
class Progress:
    """Progress of a supervisor: reported log offset and state, last renewal of credentials."""

    offset: int
    observation: Observation | None = None
    renewed_at: float = field(default_factory=time.monotonic)


def failure(job: Job, observation: Observation) -> Exception:
    """Return the error of a failed job.

    Its message says what to correct, or the number of attempts and why the last one ended.
    """
    reason = observation.reason or ExitReason.UNKNOWN
    if reason is ExitReason.BAD_CONFIGURATION:
        return BadConfiguration(observation.detail)
    attempts = pluralize(observation.attempt, "attempt")
    return JobFailed(f"{job.program} {job.id} failed after {attempts}: {observation.detail}", reason)
