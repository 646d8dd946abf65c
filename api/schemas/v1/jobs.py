"""Jobs and runs of pipelines as JSON (rows G1, G6, G9)."""

from typing import Any, Literal, NotRequired, cast

from typing_extensions import TypedDict

from api.schemas.v1.runs import Status
from recipes.contracts.results import EvaluationReport
from recipes.storage.manifest import Artifact
from resources.metadata.job_record import mask_config
from resources.metadata.jobs import JobRecord

JobType = Literal["training", "eval", "conversion", "preprocessing", "preparation"]


class GateVerdict(TypedDict):
    """Whether the model may go to staging; `reasons` holds one line for each rule that it broke."""

    accepted: bool
    reasons: list[str]


class Evaluation(TypedDict):
    """`report` is what the program evaluate found, `artifact` where it lies."""

    report: EvaluationReport
    verdict: GateVerdict
    artifact: Artifact


class Job(TypedDict):
    """`config` is as it was submitted; of variables it has the names alone. `reason` is why it waits or failed."""

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


class JobWithLogs(Job):
    """With the last lines of its program's log."""

    logs: list[str]


class Jobs(TypedDict):
    jobs: list[Job]
    next_page_token: NotRequired[str]


class PipelineRun(Job):
    """The job that was queued; `run_id` and `job_id` are its id."""

    run_id: str
    job_id: str
    pipeline_id: str


def job_json(job: JobRecord) -> Job:
    """`type` as it was submitted; variables of a job with a command have no values."""
    return cast(Job, {**vars(job), "type": job.config.get("type", job.type), "config": mask_config(job.config)})
