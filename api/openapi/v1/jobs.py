"""Jobs and runs of pipelines (rows G1, G6, G9)."""

from typing import Any, Literal

from api.openapi.v1.artifacts import Artifact
from api.openapi.v1.tracking import Status
from api.schemas.mlflow.responses import Message

JobType = Literal["training", "eval", "conversion", "preprocessing", "preparation"]


class GateVerdict(Message):
    """Whether the model may go to staging; `reasons` holds one line for each rule that it broke."""

    accepted: bool
    reasons: list[str]


class ModelScores(Message):
    """Null where not finite."""

    loss: float | None
    perplexity: float | None
    accuracy: float


class EvaluationReport(Message):
    """Scores by model, and every question with each model's answer; `left_out` are records that cannot be asked."""

    scores: dict[str, ModelScores]
    num_records: int
    left_out: int
    samples: list[dict[str, Any]]
    questions: list[dict[str, Any]]


class Evaluation(Message):
    """`report` is what the program evaluate found, `artifact` where it lies."""

    report: EvaluationReport
    verdict: GateVerdict
    artifact: Artifact


class Job(Message):
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


class Jobs(Message):
    jobs: list[Job]
    next_page_token: str = ""


class PipelineRun(Job):
    """The job that was queued; `run_id` and `job_id` are its id."""

    run_id: str
    job_id: str
    pipeline_id: str
