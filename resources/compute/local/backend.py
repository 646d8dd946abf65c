"""Local backend: a job is a process group that outlives its supervisor."""

import os
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from pydantic import ValidationError

from recipes.contracts.exit_reason import ExitReason, read_exit_document
from recipes.contracts.job import EXIT_FILE, BadConfiguration, Job, Program
from recipes.extras import TRAIN, lacking
from recipes.job_processes import kill_job_processes
from resources.compute.base import GRACE_SECONDS, POLL_SECONDS, Compute, JobKey, Observation, Phase
from resources.compute.credentials import Credentials
from resources.compute.local.admission import Admission
from resources.compute.local.capacity import common_gpu_type, gpu_names, installed_gpus, max_running_jobs
from resources.compute.local.command import command, environment
from resources.compute.local.gpu_meter import GpuMeter, Meter, NoMeter
from resources.compute.local.inherited_environment import inherited_environment
from resources.compute.local.leases import Leases
from resources.compute.local.restarts import Start, next_start, record_exit, record_kill, record_memory_kills
from resources.compute.local.work_folder import (
    ATTEMPT_FILE,
    FAILED_ATTEMPTS_FILE,
    JOB_FILE,
    QUEUED_START_FILE,
    QUEUED_UNTIL_FILE,
    follow_clock_change,
    is_time_over,
    last_sign,
    read_number,
    read_start,
    record_start,
    start_time,
    work_folder,
)
from resources.installation import SOURCE
from resources.metadata.database import Database
from resources.settings.settings import Settings
from resources.stack.detached_process import (
    LOG_FILE,
    is_running,
    lock_folder,
    request_stop,
    start_detached,
    stop_process,
    write_json_atomic,
)

TORCH_PROGRAMS = (Program.TRAIN, Program.EVALUATE, Program.CONVERT)


class LocalCompute(Compute):
    """Jobs as detached processes.

    Args:
        jobs: folder of the work folders of all jobs.
        source: folder in which `recipes` is importable.
        max_restarts: maximum number of restarts after a kill or an exit that requests a restart; defaults to the job's
            schedule. Preemptions are not counted.
        grace_seconds: time between SIGTERM and SIGKILL when a job is cancelled.
        leases: creates the leases of slots and GPUs when a job is first started; without it, jobs are not limited and a
            program uses all GPUs that it finds.
        meter: records the GPUs that attempts hold.
    """

    def __init__(
        self,
        jobs: Path,
        *,
        source: Path = SOURCE,
        max_restarts: int | None = None,
        grace_seconds: float = GRACE_SECONDS,
        poll_seconds: float = POLL_SECONDS,
        credentials: Credentials | None = None,
        leases: Callable[[], Leases] = lambda: Leases(Path()),
        meter: Meter | None = None,
    ) -> None:
        super().__init__(poll_seconds, credentials)
        self.jobs = jobs
        self.source = source
        self.max_restarts = max_restarts
        self.grace_seconds = grace_seconds
        self._leases = leases
        self._meter = meter or NoMeter()

    @cached_property
    def admission(self) -> Admission:
        """Admission queue, created lazily.

        It queries the GPU driver, which a process that only reads logs need not load.
        """
        return Admission(self._leases())

    def folder(self, job: JobKey) -> Path:
        """Return the work folder of a job."""
        return work_folder(self.jobs, job)

    def submit(self, job: Job) -> None:
        """Start the job, or attach to it.

        Raises:
            BadConfiguration: the job requests more than one node, or its program needs a package that is not installed.
        """
        if job.distributed and job.distributed.num_nodes > 1:
            raise BadConfiguration(
                f"the job asks for {job.distributed.num_nodes} nodes, this machine is one: set distributed.num_nodes to 1"
            )
        work = self.folder(job)
        work.mkdir(parents=True, exist_ok=True)
        job = job.model_copy(update={"work_dir": str(work)})
        write_document(job, work / JOB_FILE)
        with lock_folder(work) as descriptor:
            # Check under the lock: a process that has just ended may have done the work.
            if descriptor is not None and not self.result(job) and not (work / QUEUED_START_FILE).exists():
                refuse_missing_packages(job.program)
                self._start(job, work, descriptor, Start(attempt=1, faults=0))

    def observe(self, job: JobKey) -> Observation:
        """Return the state of a job; restart its program if allowed.

        Raises:
            FileNotFoundError: the job was never submitted.
        """
        work = self.folder(job)
        job = Job.model_validate_json((work / JOB_FILE).read_bytes())
        follow_clock_change(work)
        over = is_time_over(job, work)
        if over and is_running(work):
            self.cancel(job)  # it may save a checkpoint or succeed within its grace period
        with lock_folder(work) as descriptor:
            attempt = read_number(work / ATTEMPT_FILE)
            if descriptor is None:
                self._meter.extend(job)
                return Observation(Phase.RUNNING, attempt)
            if attempt:
                self._meter.end(job, last_sign(work))
            if self.result(job):
                return Observation(Phase.SUCCEEDED, attempt, reason=ExitReason.COMPLETED)
            if (work / QUEUED_START_FILE).exists():
                queued = Start.model_validate_json((work / QUEUED_START_FILE).read_bytes())
                return self._start(job, work, descriptor, queued)
            if over:
                terminate_leftovers(job)
                limit = job.schedule.max_duration
                detail = f"it exceeded schedule.max_duration ({limit}): what it saved is kept, increase the limit to resume"
                record_exit(work, ExitReason.TIMED_OUT, detail)
                return Observation(Phase.FAILED, attempt, detail, ExitReason.TIMED_OUT)
            ended = read_exit_document(work) or record_kill(work)
            retries = job.schedule.retries if self.max_restarts is None else self.max_restarts
            begin = next_start(ended, attempt, work, retries)
            terminate_leftovers(job)  # they would use GPUs that may be leased to another job
            if begin is None:
                return Observation(Phase.FAILED, attempt, ended.message, ended.reason)
            return self._start(job, work, descriptor, begin)

    def cancel(self, job: JobKey) -> None:
        work = self.folder(job)
        stop_process(work, self.grace_seconds)
        (work / QUEUED_START_FILE).unlink(missing_ok=True)
        self.admission.withdraw(job)
        terminate_leftovers(job)
        self._meter.end(job, last_sign(work))

    def read_log(self, job: JobKey, offset: int, max_bytes: int | None = None) -> bytes:
        try:
            with (self.folder(job) / LOG_FILE).open("rb") as file:
                file.seek(offset)
                return file.read(max_bytes)
        except FileNotFoundError:
            return b""

    def log_size(self, job: JobKey) -> int:
        log = self.folder(job) / LOG_FILE
        return log.stat().st_size if log.is_file() else 0

    def has_processes(self, job: JobKey) -> bool:
        return is_running(self.folder(job))

    def terminate_processes(self, job: JobKey) -> None:
        request_stop(self.folder(job), self.grace_seconds)

    def queued_until(self, job: JobKey) -> int:
        work = self.folder(job)
        if (work / QUEUED_START_FILE).exists():
            return time.time_ns() // 1_000_000
        queued_until = work / QUEUED_UNTIL_FILE
        return queued_until.stat().st_mtime_ns // 1_000_000 if queued_until.exists() else 0

    def _start(self, job: Job, work: Path, descriptor: int, begin: Start) -> Observation:
        """Start the program, or queue it until it is admitted.

        A queued start is retried at the next poll. An error changes nothing.
        """
        queued, now = work / QUEUED_START_FILE, time.time()
        with self.admission.admit(job) as lease:
            if lease is None:
                if not queued.exists():
                    used = now - read_start(work) if begin.attempt > 1 else None
                    write_json_atomic(queued, begin.model_copy(update={"used": used}).model_dump())
                detail = "; ".join(filter(None, (self.admission.describe_wait(job), begin.detail)))
                return Observation(Phase.PENDING, begin.attempt, detail, begin.reason)
            # Before any file changes, so that a start that fails because the metadata is unavailable counts no attempt.
            env = {**environment(job), **self.credentials.issue(job), **lease.variables}
            self._meter.start(job, len(lease.gpus or ()))
            if begin.attempt == 1:
                record_start(work, start_time(job, work, now))
            elif begin.used is not None:
                record_start(work, now - begin.used)
            write_json_atomic(work / FAILED_ATTEMPTS_FILE, begin.faults)
            if queued.exists():
                (work / QUEUED_UNTIL_FILE).touch()
                queued.unlink()
            (work / EXIT_FILE).unlink(missing_ok=True)
            write_json_atomic(work / ATTEMPT_FILE, begin.attempt)
            record_memory_kills(work)
            start_detached(
                command(job, work / JOB_FILE),
                work,
                descriptor,
                cwd=self.source,
                env=env,
                inherited_descriptors=lease.locks,
                inherited_env=inherited_environment(os.environ, job.store),
            )
        phase = Phase.RESTARTING if begin.attempt > 1 else Phase.RUNNING
        return Observation(phase, begin.attempt, begin.detail, begin.reason)


def open_backend(settings: Settings, credentials: Credentials) -> LocalCompute:
    """Open the local backend, with its state in the state folder."""

    def leases() -> Leases:
        scheduler = settings.scheduler
        return Leases(settings.home / "gpus", gpu_names(scheduler), max_running_jobs(scheduler))

    def database() -> Database:
        return Database(settings.database_url, settings.database.connect_seconds)

    def gpu_type() -> str | None:
        return common_gpu_type(installed_gpus(), settings.scheduler.gpu_types)

    meter = GpuMeter(database, gpu_type)
    return LocalCompute(settings.home / "jobs", credentials=credentials, leases=leases, meter=meter)


def refuse_missing_packages(program: Program) -> None:
    """Check that the packages of a program are installed.

    Raises:
        BadConfiguration: the program imports PyTorch and the extra `train` is not installed.
    """
    if program in TORCH_PROGRAMS and (problem := lacking(f"the program {program}", TRAIN)):
        raise BadConfiguration(problem)


def write_document(job: Job, path: Path) -> None:
    """Write the job document unless an equal one exists.

    Attaching to a running program thus writes nothing.
    """
    try:
        if Job.model_validate_json(path.read_bytes()) == job:
            return
    except (FileNotFoundError, ValidationError):
        pass
    write_json_atomic(path, job.model_dump(mode="json"))


def terminate_leftovers(job: JobKey) -> None:
    """Kill processes of a user's command that outlived the killed program."""
    if job.program is Program.COMMAND:
        kill_job_processes(job.id)
