"""The contract between control plane and programs: jobs, resources, checkpoint policy, results."""

import hashlib
import math
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, FiniteFloat, JsonValue, field_validator, model_validator

from recipes.contracts.frozen_model import FrozenModel, YamlModel
from recipes.contracts.pod_settings import Environment, PodSettings
from recipes.contracts.quantities import Duration, parse_duration, validate_quantity
from recipes.contracts.rendering import CURRENT_RENDERING, KeptRendering, restore_rendering
from recipes.storage import uris
from recipes.storage.manifest import Artifact, canonical_json

# The contract between the asset graph and the programs, as types.
#
# Everything exchanged between a control plane process and a pod belongs here. How a job runs is in `resources.compute`,
# where its bytes are stored in `recipes.storage.artifact_store`.

MAX_COUNT = 1_000_000
"""Limit for counts that cause work per item, such as rows and processes: more is a mistake or an attack."""
MAX_PROCESSORS = 1024
"""Limit per machine: more threads or processes are a mistake that would overload it."""
MAX_STEPS = 1_000_000_000
"""Limit of a run's steps, and of the steps between two checkpoints."""
UNSTABLE_INTERVAL_STEPS = 500
"""Maximum steps between checkpoints of a run that has diverged before."""
PREEMPTIBLE_INTERVAL = "20m"
"""Time between checkpoints of a job whose nodes may be preempted."""
GRACE_PERIOD = "300s"
MAX_GRACE_SECONDS = 3600
"""Maximum time from SIGTERM to SIGKILL, for saving a checkpoint."""
STALL_LIMIT = "30m"
"""Longer than the slowest step, and than saving a checkpoint."""
RETRIES = 11
"""Restarts of a job. Recovery alone may use eight (`recipes.contracts.recovery_log.MAX_PER_KIND` of two kinds, and one each
of two others); the rest is for killed processes."""


Quantity = Annotated[str, AfterValidator(validate_quantity)]


class StoreAddress(FrozenModel):
    """Address of the object store.

    `root` is `file:///folder`, the endpoint of an S3 server, or in a pod the API's `api+http://...`
    (`recipes.storage.signed_bucket`). `buckets` maps the specification's kinds (datasets, checkpoints, models) to bucket
    names. An S3 server encrypts objects at rest as set by `encryption`, and verifies uploads by `checksum`.
    """

    root: str
    buckets: dict[str, str]
    encryption: Literal["AES256", "aws:kms", "none"] = "AES256"
    kms_key: str | None = None
    checksum: Literal["SHA256", "none"] = "SHA256"


class Program(StrEnum):
    PREPARE = "prepare"
    SPLIT = "split"
    VALIDATE = "validate"
    FIND_LEAKS = "find_leaks"
    TRAIN = "train"
    EVALUATE = "evaluate"
    CONVERT = "convert"
    COMMAND = "command"


class Hardware(YamlModel):
    """Resources of one node."""

    gpus: int = Field(0, ge=0, le=MAX_COUNT)
    gpu_type: str | None = None
    memory: Quantity | None = None
    cpu: int | None = Field(None, ge=0, le=MAX_PROCESSORS)


class Elastic(YamlModel):
    """Permission to train on fewer nodes if not all are free.

    Samples and their order stay the same.
    """

    min_nodes: int = Field(ge=1, le=MAX_COUNT)
    wait: Duration = Field("10m", description="how long to wait for all nodes")


class Distributed(YamlModel):
    """Shape of a multi-process job."""

    strategy: Literal["ddp", "fsdp", "deepspeed_zero2", "deepspeed_zero3", "pipeline"] = "ddp"
    num_nodes: int = Field(1, ge=1, le=MAX_COUNT)
    gpus_per_node: int = Field(8, ge=1, le=MAX_COUNT)
    # Omitted if 1, so that digests of runs from before this key stay the same.
    tensor_parallel: int = Field(
        1,
        ge=1,
        le=MAX_COUNT,
        exclude_if=lambda value: value == 1,
        description="processes per node that share each weight and compute the same rows",
    )
    backend: Literal["nccl", "gloo"] = "nccl"
    sharding: Literal["full_shard"] | None = None
    gang_scheduling: bool = True
    rdma: Literal["auto", "enabled", "disabled"] = "auto"
    elastic: Elastic | None = Field(
        None, exclude_if=lambda value: value is None, description="on a cluster; without it, all nodes or none"
    )

    @model_validator(mode="after")
    def validate_elastic(self) -> Self:
        if self.elastic and self.elastic.min_nodes >= self.num_nodes:
            raise ValueError(
                f"elastic.min_nodes is {self.elastic.min_nodes}, but must be less than num_nodes {self.num_nodes}"
            )
        return self

    @model_validator(mode="after")
    def validate_tensor_parallel(self) -> Self:
        if self.tensor_parallel > 1 and self.strategy != "fsdp":
            raise ValueError(f"tensor_parallel is not supported by {self.strategy}: use strategy fsdp, or remove it")
        if self.gpus_per_node % self.tensor_parallel:
            raise ValueError(
                f"gpus_per_node {self.gpus_per_node} is not a multiple of tensor_parallel {self.tensor_parallel}: "
                "use a number that divides it"
            )
        return self


PRIORITY_BY_QUEUE = {"interactive": "low", "batch": "medium", "production": "high"}
"""The specification has two vocabularies of priorities; both are accepted."""


def normalize_priority(value: Any) -> Any:
    return PRIORITY_BY_QUEUE.get(value, value) if isinstance(value, str) else value


Priority = Annotated[Literal["low", "medium", "high"], BeforeValidator(normalize_priority)]


class Schedule(FrozenModel):
    """Limits that the scheduler enforces over all attempts of a job."""

    max_duration: Duration = "48h"
    checkpoint_interval: Duration | None = Field(None, description="overrides the recipe's")
    preemptible: bool = False
    priority: Priority = Field(
        "medium", description="or the name of its queue in the specification: interactive (low), batch, production (high)"
    )
    # Omitted at their defaults, so that documents of jobs from before these keys stay the same.
    grace_period: Duration = Field(
        GRACE_PERIOD,
        exclude_if=lambda value: value == GRACE_PERIOD,
        description="on a cluster, from the request to stop until the job is killed",
    )
    retries: int = Field(
        RETRIES,
        ge=0,
        le=MAX_COUNT,
        exclude_if=lambda value: value == RETRIES,
        description="restarts after faults without progress; preemptions and lost nodes do not count",
    )
    stall_limit: Duration = Field(
        STALL_LIMIT,
        exclude_if=lambda value: value == STALL_LIMIT,
        description="on a cluster, how long a training may make no progress until the attempt is ended and counted",
    )

    @field_validator("grace_period")
    @classmethod
    def check_grace_period(cls, value: str) -> str:
        if parse_duration(value) > MAX_GRACE_SECONDS:
            raise ValueError(
                f"{value} exceeds the maximum of {MAX_GRACE_SECONDS} s: a cancelled job holds its GPUs that long"
            )
        return value

    @property
    def grace_seconds(self) -> int:
        return math.ceil(parse_duration(self.grace_period))

    @property
    def shutdown_seconds(self) -> int:
        """Grace period that torchrun gives its processes, shorter so that torchrun itself can exit cleanly."""
        return max(1, self.grace_seconds * 9 // 10)


class CheckpointPolicy(YamlModel):
    """When to save checkpoints, by time or steps, whichever comes first, and which to keep.

    `keep_last` counts the newest checkpoints. The best one is kept in addition, and the last one before a loss that may be
    diverging. A run that resumes from `best` or from a step keeps all its checkpoints and writes new ones below `from-STEP`.
    """

    interval: Duration = "1h"
    interval_steps: int = Field(
        1000, ge=1, le=MAX_STEPS, description="at most 500 for a run that recovered from a divergence"
    )
    keep_last: int = Field(3, ge=1, le=MAX_COUNT)
    save_on_preempt: bool = Field(True, description="on SIGTERM, save the last complete step within the grace period")
    # Omitted if unset, so that digests of runs from before this key stay the same.
    compression: Literal["zstd"] | None = Field(None, exclude_if=lambda value: value is None, description="of uploads")
    resume_from: Literal["latest", "best"] | Annotated[int, Field(ge=1)] = "latest"
    storage: uris.CheckpointTemplate | None = Field(
        None, exclude=True, description="location of all runs' checkpoints; fixed, accepted for documentation"
    )

    def for_schedule(self, schedule: Schedule) -> Self:
        """Return the policy of a job.

        Its own interval overrides the recipe's; a preemptible job saves at least every 20 minutes.
        """
        interval = schedule.checkpoint_interval
        if interval is None and schedule.preemptible:
            interval = min(self.interval, PREEMPTIBLE_INTERVAL, key=parse_duration)
        return self.model_copy(update={"interval": interval}) if interval else self

    def for_unstable_run(self) -> Self:
        """Return the policy of a run that recovered from a divergence, and may diverge again."""
        return self.model_copy(update={"interval_steps": min(self.interval_steps, UNSTABLE_INTERVAL_STEPS)})


class Tracking(FrozenModel):
    """The tracked run that a program logs to."""

    uri: str
    run_id: str


class Job(FrozenModel):
    """Everything that a program needs, and its only input."""

    id: str
    program: Program
    inputs: dict[str, Artifact] = Field(default_factory=dict)
    parameters: dict[str, JsonValue] = Field(default_factory=dict)
    outputs: dict[str, str] = Field(default_factory=dict, description="logical URI to publish under, by role")
    result_uri: str = Field(description="logical URI of the Result, written when the job succeeds")
    store: StoreAddress
    work_dir: str = Field(
        "", description="working directory of this job, set by the backend; survives a restart on the same machine"
    )
    cache_dir: str = Field(description="folder shared by jobs for content-addressed downloads")
    tracking: Tracking | None = None
    hardware: Hardware = Hardware()
    distributed: Distributed | None = None
    pods: int = Field(
        1, ge=1, description="on a cluster, for programs that can share their work through the store (prepare)"
    )
    checkpoint: CheckpointPolicy = CheckpointPolicy()
    schedule: Schedule = Schedule()
    rendering: KeptRendering = CURRENT_RENDERING
    # Omitted if empty, so that documents of jobs from before these keys stay the same.
    env: Environment = Field(
        {}, exclude_if=lambda value: not value, description="additional environment variables of the program"
    )
    pod: PodSettings = Field(PodSettings(), exclude_if=lambda value: value == PodSettings())

    _restore_rendering = model_validator(mode="before")(restore_rendering)

    @property
    def gpus(self) -> int:
        """Number of GPUs on all nodes."""
        return self.hardware.gpus * (self.distributed.num_nodes if self.distributed else 1)

    @property
    def work_digest(self) -> str:
        """SHA-256 of what the job computes, independent of where it runs.

        Equal work has equal digests.
        """
        computed = {"program", "inputs", "parameters", "outputs"}
        return hashlib.sha256(canonical_json(self.model_dump(mode="json", include=computed))).hexdigest()


class Machine(FrozenModel):
    """Properties of a machine that affect the last bits of results.

    `threads` is the number of threads per operation.
    """

    python: str
    packages: dict[str, str] = Field(default_factory=dict, description="versions of numerical packages, by name")
    processor: str
    gpus: tuple[str, ...] = ()
    threads: int


class Result(FrozenModel):
    """Outputs of a program.

    Written atomically as its last action: a job without a result has not succeeded. JSON has neither NaN nor infinity: as
    metrics they are rejected here, instead of being written in a non-standard form.
    """

    work_digest: str
    artifacts: dict[str, Artifact] = Field(default_factory=dict)
    metrics: dict[str, FiniteFloat] = Field(default_factory=dict)
    facts: dict[str, JsonValue] = Field(default_factory=dict)
    machine: Machine | None = Field(None, description="the machine it was computed on; added when the program ends")


class BadConfiguration(Exception):
    """The user's input is wrong; the message is one line with advice.

    Programs exit with 78, without a retry.
    """


EXIT_FILE = "exit.json"
"""File in a job's work folder: why its program ended by itself without a result, for the supervisor."""

OUT_OF_MEMORY_FILE = "memory_ran_out"
"""File in a job's work folder: the kernel killed its program for lack of memory, unnoticed by the program."""

FAILED_FILE = "failed"
"""File in a job's work folder: its program has failed on this node and is storing outputs together with other nodes."""

EXIT_BAD_CONFIGURATION = 78
"""EX_CONFIG of sysexits.h: a restart would not help; the Job's podFailurePolicy fails the job at once."""

EXIT_PREEMPTED = 143
"""Ended on SIGTERM after an emergency checkpoint: a restart resumes from it."""

EXIT_RESTART = 75
"""EX_TEMPFAIL of sysexits.h: ended by itself after recording how to proceed differently; a restart does so."""
