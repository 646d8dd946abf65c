"""The contract of compute: start or re-attach, observe, cancel; and `run`, the one way to run a job.

An implementation answers for phases that only a cluster has (pending, suspended, preempted) in the same words, so nothing
above knows where a job runs. All its state is outside the supervisor, which may die and come back at any moment.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from pydantic import ValidationError

from recipes.contracts.exit_reason import ExitReason
from recipes.counted import counted
from recipes.schema import BadConfiguration, Job, Result
from recipes.store import Store

log = logging.getLogger(__name__)

MAX_RESTARTS = 11
"""How often a job starts again before it counts as failed: to heal, a run may ask for eight (`recipes.incidents.MOST` of two
kinds, and one of two others), and is killed besides."""
POLL_SECONDS = 0.2
MOST_LINES = 200
"""Of a look. Each is an event of a Dagster run, which takes it up to 40 ms: a script that had printed 100,000 of them in two
seconds was running for over an hour, and what waited for its place waited for that.
"""
LONGEST_LINE = 10_000
GRACE_SECONDS = 300
"""Row J3: from SIGTERM to SIGKILL."""
SHUTDOWN_SECONDS = 270
"""What torchrun gives its processes of that, so that it can still end in order itself."""
RENEW_SECONDS = 3600.0
"""How often whoever follows a job says that it still runs: a fraction of what a job may take."""

PATIENCE_SECONDS = 3600.0
"""How long a job is followed in vain: its program goes on while the store, the metadata or Dagster's database are away."""
RETRY_SECONDS = 1.0
"""Between two looks in vain."""


class Phase(StrEnum):
    """Where a job stands."""

    PENDING = "pending"  # waits for room: not admitted, or not scheduled yet
    SUSPENDED = "suspended"  # had to give its nodes back; will be resumed
    RUNNING = "running"
    RESTARTING = "restarting"  # killed or preempted; starts again from its last checkpoint
    SUCCEEDED = "succeeded"
    FAILED = "failed"


@dataclass(frozen=True)
class Observation:
    """One look at a job. `attempt` counts its starts from 1; `detail` is one line for people.

    `reason` is why the newest attempt that has ended did: of a failed job always known.
    """

    phase: Phase
    attempt: int
    detail: str = ""
    reason: ExitReason | None = None


@dataclass(frozen=True)
class Follower:
    """Who is told while a job runs: each new line of its log, each change of its phase."""

    line: Callable[[str], None]
    phase: Callable[[Observation], None]


class Credentials(Protocol):
    """What a job's program proves itself with: variables of its environment, because its job file has many readers."""

    def issue(self, job: Job) -> Mapping[str, str]:
        """For a start of the program; void what an earlier start had."""
        ...

    def is_good(self, job: Job, token: str) -> bool:
        """Whether a start of the program that has this token can go on with it."""
        ...

    def renew(self, job: Job) -> None:
        """The program still runs."""
        ...

    def revoke(self, job: Job) -> None:
        """The program has ended for good."""
        ...


class NoCredentials:
    """For programs that ask nobody anything."""

    def issue(self, job: Job) -> Mapping[str, str]:
        return {}

    def is_good(self, job: Job, token: str) -> bool:
        return True

    def renew(self, job: Job) -> None:
        pass

    def revoke(self, job: Job) -> None:
        pass


class JobFailed(Exception):
    """The program ended without a result and will not be restarted. `reason` decides whether the work is tried again."""

    def __init__(self, message: str, reason: ExitReason = ExitReason.PROGRAM_ERROR) -> None:
        super().__init__(message)
        self.reason = reason


class Compute(ABC):
    """Runs jobs. Implementations keep no state in memory that a restarted supervisor would miss."""

    def __init__(self, poll_seconds: float = POLL_SECONDS, credentials: Credentials | None = None) -> None:
        self.poll_seconds = poll_seconds
        self.credentials: Credentials = credentials or NoCredentials()

    @abstractmethod
    def submit(self, job: Job) -> None:
        """Start the job, or attach to it when it runs already (by its id): calling it twice starts one."""

    @abstractmethod
    def observe(self, job: Job) -> Observation:
        """How the job stands now. Restarts what may be restarted."""

    @abstractmethod
    def cancel(self, job: Job) -> None:
        """End the job within its grace period; it may save a checkpoint first."""

    @abstractmethod
    def waited_until(self, work_dir: str) -> int:
        """Until when the program in a folder had to wait for room, in ms since 1970; now, where it waits still; 0: never."""

    @abstractmethod
    def is_left(self, work_dir: str) -> bool:
        """Whether a program works in a folder that nobody follows any more."""

    @abstractmethod
    def end_left(self, work_dir: str) -> None:
        """Tell such a program to end, without waiting for it: asked again when its grace is over, this ends it."""

    @abstractmethod
    def log(self, job: Job, offset: int) -> tuple[str, int]:
        """The log from byte `offset` on, in whole lines, over all attempts; and the offset to go on from."""

    def result(self, job: Job) -> Result | None:
        """What the job made, when it has ended well: a result of other work under the same id does not count."""
        try:
            result = Result.model_validate_json(Store(job.store).get_bytes(job.result_uri))
        except (FileNotFoundError, ValidationError):
            return None
        return result if result.work_digest == job.work_digest else None

    def run(self, job: Job, follower: Follower) -> Result:
        """Run the job to its end, or go on with it where a supervisor before this one left off.

        Work that is done is not done again: an equal job that has a result returns it.

        Raises:
            BadConfiguration: the program refused its input; the message says what to do.
            JobFailed: it ended otherwise without a result; its `reason` says why.
        """
        if done := self.result(job):
            follower.line(f"{job.program} {job.id} was done before")
            self.credentials.revoke(job)
            return done
        _, offset = self.log(job, 0)
        self.submit(job)
        told = Told(offset)
        looked = time.monotonic()
        try:
            while True:
                try:
                    done = self._look(job, follower, told)
                except (BadConfiguration, JobFailed):
                    raise
                except Exception as error:
                    # Of whoever looks, not of the program: a training of weeks was ended for it, for a second's outage.
                    if time.monotonic() - looked > PATIENCE_SECONDS:
                        raise
                    log.warning("%s %s could not be looked at, and will be again: %r", job.program, job.id, error)
                    time.sleep(RETRY_SECONDS)
                    continue
                if done:
                    return done
                looked = time.monotonic()
                time.sleep(self.poll_seconds)
        except (BadConfiguration, JobFailed):
            raise
        except BaseException:
            # Dagster cancels a run by an exception out of nowhere in its worker; whoever follows no longer wants the job.
            self.cancel(job)
            self.credentials.revoke(job)
            raise

    def _look(self, job: Job, follower: Follower, told: "Told") -> Result | None:
        """Tell what is new of a job; returns its result once it has one. Raises as `run` does where it has failed."""
        if time.monotonic() - told.renewed > RENEW_SECONDS:
            self.credentials.renew(job)
            told.renewed = time.monotonic()
        observation = self.observe(job)
        text, told.offset = self.log(job, told.offset)
        for line in worth_telling(text.splitlines(), job.id):
            follower.line(line)
        if observation != told.phase:
            follower.phase(observation)
            told.phase = observation
        done = self.result(job) if observation.phase is Phase.SUCCEEDED else None
        if done or observation.phase is Phase.FAILED:
            self.credentials.revoke(job)
        if observation.phase is Phase.FAILED:
            raise failure(job, observation)
        return done


def worth_telling(lines: Sequence[str], job: str) -> Iterator[str]:
    """Of what a log has got since the last look, no more than a follower can take: the log itself has all of it."""
    if len(lines) > MOST_LINES:
        yield f"... {counted(len(lines) - MOST_LINES, 'line')} more: see `hanzo-ml job logs {job}`"
    for line in lines[-MOST_LINES:]:
        cut = f"... {counted(len(line) - LONGEST_LINE, 'character')} more" if len(line) > LONGEST_LINE else ""
        yield line[:LONGEST_LINE] + cut


@dataclass
class Told:
    """What whoever follows a job was told of it, and when it was said last that the program still runs."""

    offset: int
    phase: Observation | None = None
    renewed: float = field(default_factory=time.monotonic)


def failure(job: Job, observation: Observation) -> Exception:
    """The error that a failed job means to the user: what to correct, or how often it was tried and why it ended."""
    reason = observation.reason or ExitReason.UNKNOWN
    if reason is ExitReason.BAD_CONFIGURATION:
        return BadConfiguration(observation.detail)
    attempts = counted(observation.attempt, "attempt")
    return JobFailed(f"{job.program} {job.id} failed after {attempts}: {observation.detail}", reason)
