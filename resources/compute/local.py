"""LocalCompute: a job as a process of this machine, which outlives whoever started it."""

import sys
from pathlib import Path

from pydantic import BaseModel, ValidationError

from recipes.schema import EXIT_PREEMPTED, EXIT_RESTART, Job
from resources.compute.base import POLL_SECONDS, Compute, Credentials, Observation, Phase
from resources.detached import LOG, lock, start, stop, write_json

ENVIRONMENT = {
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Threads that spin while they wait lose most of their time on a machine that does other work too.
    "OMP_WAIT_POLICY": "PASSIVE",
}
ATTEMPT = "attempt.json"


class Exit(BaseModel):
    """What the program said as it ended; a killed one says nothing."""

    code: int
    message: str


class LocalCompute(Compute):
    """Jobs as detached processes.

    Args:
        source: folder in which `recipes` is importable.
        max_restarts: how often a job that was killed or preempted, or asks for it, starts again before it counts as failed.
        grace_seconds: time between SIGTERM and SIGKILL when a job is cancelled (specification row J3).
    """

    def __init__(
        self,
        *,
        source: Path,
        max_restarts: int = 5,
        grace_seconds: float = 300.0,
        poll_seconds: float = POLL_SECONDS,
        credentials: Credentials | None = None,
    ) -> None:
        super().__init__(poll_seconds, credentials)
        self.source = source
        self.max_restarts = max_restarts
        self.grace_seconds = grace_seconds

    def submit(self, job: Job) -> None:
        work = Path(job.work_dir)
        work.mkdir(parents=True, exist_ok=True)
        with lock(work) as descriptor:
            # Asked under the lock: a process that ended a moment ago may have done the work.
            if descriptor is not None and not self.result(job):
                self._start(job, work, descriptor, attempt=1)

    def observe(self, job: Job) -> Observation:
        work = Path(job.work_dir)
        with lock(work) as descriptor:
            attempt = read_attempt(work)
            if descriptor is None:
                return Observation(Phase.RUNNING, attempt)
            if self.result(job):
                return Observation(Phase.SUCCEEDED, attempt)
            ended = read_exit(work)
            detail = ended.message if ended else "killed"
            code = ended.code if ended else None
            if code not in (None, EXIT_PREEMPTED, EXIT_RESTART) or attempt > self.max_restarts:
                return Observation(Phase.FAILED, attempt, detail, code)
            self._start(job, work, descriptor, attempt=attempt + 1)
            return Observation(Phase.RESTARTING, attempt + 1, detail, code)

    def cancel(self, job: Job) -> None:
        stop(Path(job.work_dir), self.grace_seconds)

    def log(self, job: Job, offset: int) -> tuple[str, int]:
        path = Path(job.work_dir) / LOG
        if not path.is_file():
            return "", 0
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        return whole.decode(errors="replace"), offset + len(whole)

    def _start(self, job: Job, work: Path, descriptor: int, *, attempt: int) -> None:
        (work / "exit.json").unlink(missing_ok=True)
        write_json(work / ATTEMPT, attempt)
        job_file = work / "job.json"
        write_json(job_file, job.model_dump(mode="json"))
        command = [sys.executable, "-m", f"recipes.{job.program}", str(job_file)]
        start(command, work, descriptor, cwd=self.source, env={**ENVIRONMENT, **self.credentials.issue(job)})


def read_attempt(work: Path) -> int:
    path = work / ATTEMPT
    return int(path.read_text()) if path.is_file() else 0


def read_exit(work: Path) -> Exit | None:
    """How the newest attempt ended, where it lived to say so."""
    try:
        return Exit.model_validate_json((work / "exit.json").read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
