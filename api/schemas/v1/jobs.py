"""Jobs and runs of pipelines as JSON."""

from collections.abc import Sequence
from typing import Any, Literal, NotRequired, cast

from typing_extensions import TypedDict

from api.schemas.v1.runs import Status
from recipes.contracts.results import EvaluationReport
from recipes.storage.manifest import Artifact
from resources.compute.base import Phase
from resources.metadata.cluster_jobs import ClusterJob
from resources.metadata.job_record import mask_config
from resources.metadata.jobs import JobRecord

JobType = Literal["training", "eval", "conversion", "preprocessing", "preparation"]


class GateVerdict(TypedDict):
    """Whether the model may go to staging; `reasons` has one line per violated rule."""

    accepted: bool
    reasons: list[str]


class Evaluation(TypedDict):
    """`report` is the result of the program evaluate, stored as `artifact`."""

    report: EvaluationReport
    verdict: GateVerdict
    artifact: Artifact


class Job(TypedDict):
    """`config` as submitted, with variable names only; `reason` is why it waits or failed."""

    id: str
    name: str
    type: JobType
    status: Status
    config: dict[str, Any]
    user_id: str
    organization: str
    submitted_at: int
    started_at: int | None
    ended_at: int | None
    reason: str
    artifacts: dict[str, Artifact]
    evaluation: Evaluation | None


class ClusterState(TypedDict):
    """State of a job's program on the cluster; `detail` is why it waits or ended.

    `queue_position` is 1 for the next one; `attempt` counts the starts; `reason` is the newest exit reason.
    """

    program: str
    phase: Literal["queued", "starting", "running", "suspended", "restarting", "succeeded", "failed"]
    detail: str
    queue_position: int | None
    attempt: int
    reason: str | None
    admitted_at: int | None


class JobWithLogs(Job):
    """With the last lines of its program's log, and `cluster` for programs on a cluster."""

    logs: list[str]
    cluster: NotRequired[list[ClusterState]]


class Jobs(TypedDict):
    jobs: list[Job]
    next_page_token: NotRequired[str]


class PipelineRun(Job):
    """The queued job; `run_id` and `job_id` are its id."""

    run_id: str
    job_id: str
    pipeline_id: str


def job_json(job: JobRecord) -> Job:
    """Convert a job to JSON: `type` as submitted, variables of a command without values."""
    return cast(Job, {**vars(job), "type": job.config.get("type", job.type), "config": mask_config(job.config)})


def job_with_logs_json(job: JobRecord, logs: list[str], states: Sequence[ClusterJob]) -> JobWithLogs:
    """Convert a job with logs, and `states` of its programs on a cluster."""
    cluster = {"cluster": [cluster_json(state) for state in states]} if states else {}
    return cast(JobWithLogs, {**job_json(job), "logs": logs, **cluster})


def cluster_json(job: ClusterJob) -> ClusterState:
    state = {
        "program": job.program.value,
        "phase": "queued" if job.phase is Phase.PENDING else job.phase.value,
        "detail": job.detail,
        "queue_position": job.queue_position,
        "attempt": job.attempt,
        "reason": job.reason.value if job.reason else None,
        "admitted_at": job.admitted_at,
    }
    return cast(ClusterState, state)
