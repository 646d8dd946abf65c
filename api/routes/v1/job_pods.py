"""/v1/jobs/{job_id}/programs/{program}: reports of the pods of a program on a cluster.

Authenticated by the program's own token. A 409 is final: the pod was replaced by another one, or its job was cancelled.
"""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

from api.auth.program_tokens import ProgramGrantDep
from api.dependencies import DatabaseDep
from api.json_bodies import TypedResponse, json_response
from api.routing import PROGRAM, Router
from recipes.contracts.exit_reason import ExitReason
from recipes.contracts.job import MAX_COUNT
from resources.compute.base import JobRef
from resources.metadata.job_attempts import Attempt, Claim, JobAttempts

MAX_GPUS_PER_NODE = 64
NodeRank = Annotated[int, Field(ge=0, lt=MAX_COUNT)]
Name = Annotated[str, Field(min_length=1, max_length=253)]
GpuIds = Annotated[tuple[Annotated[str, Field(max_length=64)], ...], Field(max_length=MAX_GPUS_PER_NODE)]


class PodReport(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class AttemptClaim(PodReport):
    """`shared`: pods share work through the store, restart alone, and join one attempt."""

    generation: Annotated[int, Field(ge=0, lt=MAX_COUNT)]
    pod_uid: Annotated[str, Field(min_length=1, max_length=64)]
    node_rank: NodeRank = 0
    num_nodes: Annotated[int, Field(ge=1, le=MAX_COUNT)] = 1
    node: Name
    gpus: GpuIds = ()
    shared: bool = False


class NodeRegistration(PodReport):
    node_rank: NodeRank
    node: Name
    gpus: GpuIds = ()


class ExitReport(PodReport):
    """`code` is the exit code that the pod will have."""

    node_rank: NodeRank
    code: Annotated[int, Field(ge=0, le=255)]
    reason: ExitReason
    message: Annotated[str, Field(max_length=10_000)]


class ClaimedAttempt(TypedDict):
    """`previous_reason` is the exit reason of the previous attempt.

    After `oom_killed`, training uses smaller micro-batches.
    """

    attempt: int
    previous_reason: str | None


class EndedAttempt(TypedDict):
    """The recorded end, which another reporter may have written first."""

    attempt: int
    reason: str | None
    message: str


router = Router("/v1/jobs/{job_id}/programs/{program}", tag="v1", strict=False)


@router.post("/attempts", PROGRAM)
def claim_attempt(grant: ProgramGrantDep, database: DatabaseDep, body: AttemptClaim) -> TypedResponse[ClaimedAttempt]:
    """Assign an attempt number to a gang, by the uid of its first pod."""
    attempts, job = JobAttempts(database), JobRef(grant.job_id, grant.program)
    claimed = attempts.claim(job, Claim(**body.model_dump()))
    earlier = [attempt for attempt in attempts.list(job) if attempt.attempt < claimed.attempt]
    previous = earlier[-1].reason if earlier else None
    return json_response(ClaimedAttempt(attempt=claimed.attempt, previous_reason=previous))


@router.post("/attempts/{attempt}/nodes", PROGRAM)
def register_node(
    grant: ProgramGrantDep, database: DatabaseDep, attempt: int, body: NodeRegistration
) -> TypedResponse[EndedAttempt]:
    """Record where a node of an attempt runs."""
    job = JobRef(grant.job_id, grant.program)
    found = JobAttempts(database).register_node(job, attempt, body.node_rank, body.node, body.gpus)
    return json_response(attempt_end(found))


@router.post("/attempts/{attempt}/exit", PROGRAM)
def report_exit(
    grant: ProgramGrantDep, database: DatabaseDep, attempt: int, body: ExitReport
) -> TypedResponse[EndedAttempt]:
    """Record why an attempt ended; the first report counts."""
    job = JobRef(grant.job_id, grant.program)
    return json_response(attempt_end(JobAttempts(database).report_exit(job, attempt, body.reason, body.message)))


def attempt_end(attempt: Attempt) -> EndedAttempt:
    return EndedAttempt(attempt=attempt.attempt, reason=attempt.reason, message=attempt.message)
