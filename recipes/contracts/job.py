"""The contract between graph and programs: jobs, resources, rewinds and results."""

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

# The contract between the asset graph and the programs: jobs, results, artifacts and recipes as types.
#
# What belongs here: anything that crosses the border between a control plane process and a pod. What does not: how a job
# is run (`resources.compute`), where its bytes lie (`recipes.storage.artifact_store`).

MAX_COUNT = 1_000_000
"""Of what is counted or divided step by step, as rows and processes are: more is a mistake, or meant to keep us busy."""
MAX_PROCESSORS = 1024
"""Of a machine: more threads, or processes, are a mistake that takes the machine from everybody."""
MAX_STEPS = 1_000_000_000
"""Of a run, or between two of its checkpoints."""
UNSTABLE_INTERVAL_STEPS = 500
"""Between two checkpoints of a run whose loss has left its band before, at most."""
PREEMPTIBLE_INTERVAL = "20m"
"""Between two checkpoints of a job whose nodes may be taken away."""
GRACE_PERIOD = "300s"
MAX_GRACE_SECONDS = 3600
"""From SIGTERM to SIGKILL, to save a checkpoint (row J3)."""
STALL_LIMIT = "30m"
"""Longer than the slowest step, and than saving a checkpoint."""
RETRIES = 11
"""Recovery alone may use eight (`recipes.contracts.recovery_log.MAX_PER_KIND` of two kinds, and one of two others); the rest
is for killed processes."""


Quantity = Annotated[str, AfterValidator(validate_quantity)]


class StoreAddress(FrozenModel):
    """Where the object store is.

    `root` is `file:///folder`, the endpoint of an S3 server, or in a pod the API's `api+http://...`
    (`recipes.storage.signed_bucket`); `buckets` maps the specification's kinds (datasets,
    checkpoints, models) to bucket names (specification row R1). An S3 server encrypts at rest as `encryption` says (row X1),
    and refuses what is not as its `checksum` says.
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
    """Resources of one node (specification row G2)."""

    gpus: int = Field(0, ge=0, le=MAX_COUNT)
    gpu_type: str | None = None
    memory: Quantity | None = None
    cpu: int | None = Field(None, ge=0, le=MAX_PROCESSORS)


class Elastic(YamlModel):
    """Permission to train on fewer nodes than a job asks for, where those are not free: same samples in the same order."""

    min_nodes: int = Field(ge=1, le=MAX_COUNT)
    wait: Duration = Field("10m", description="how long all nodes are waited for")


class Distributed(YamlModel):
    """Shape of a multi-process job (specification row H1)."""

    strategy: Literal["ddp", "fsdp", "deepspeed_zero2", "deepspeed_zero3", "pipeline"] = "ddp"
    num_nodes: int = Field(1, ge=1, le=MAX_COUNT)
    gpus_per_node: int = Field(8, ge=1, le=MAX_COUNT)
    # Left out where it is 1: runs that were made before there was this key keep their digests.
    tensor_parallel: int = Field(
        1,
        ge=1,
        le=MAX_COUNT,
        exclude_if=lambda value: value == 1,
        description="processes of a node that hold a part of each weight and compute the same rows together (row H4)",
    )
    backend: Literal["nccl", "gloo"] = "nccl"
    sharding: Literal["full_shard"] | None = None
    gang_scheduling: bool = True
    rdma: Literal["auto", "enabled", "disabled"] = "auto"
    elastic: Elastic | None = Field(
        None, exclude_if=lambda value: value is None, description="on a cluster; all nodes or none when unset"
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
            raise ValueError(f"tensor_parallel is not known to {self.strategy}: use strategy fsdp, or leave it out")
        if self.gpus_per_node % self.tensor_parallel:
            raise ValueError(
                f"gpus_per_node {self.gpus_per_node} is no multiple of tensor_parallel {self.tensor_parallel}: "
                "take a number that divides it"
            )
        return self


PRIORITY_BY_QUEUE = {"interactive": "low", "batch": "medium", "production": "high"}
"""The specification names priorities in two vocabularies; both are accepted."""


def normalize_priority(value: Any) -> Any:
    return PRIORITY_BY_QUEUE.get(value, value) if isinstance(value, str) else value


Priority = Annotated[Literal["low", "medium", "high"], BeforeValidator(normalize_priority)]


class Schedule(FrozenModel):
    """Limits that the scheduler enforces (specification rows G2, G5), over all starts of a job."""

    max_duration: Duration = "48h"
    checkpoint_interval: Duration | None = Field(None, description="instead of the recipe's")
    preemptible: bool = False
    priority: Priority = Field(
        "medium", description="or the name of its queue in the specification: interactive (low), batch, production (high)"
    )
    # Left out at their defaults: jobs that were submitted before there were these keys keep their documents.
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
            raise ValueError(f"{value} is more than {MAX_GRACE_SECONDS} s, for which a cancelled job would hold its GPUs")
        return value

    @property
    def grace_seconds(self) -> int:
        return math.ceil(parse_duration(self.grace_period))

    @property
    def shutdown_seconds(self) -> int:
        """Grace period that torchrun gives its processes: shorter, so that torchrun can exit cleanly too."""
        return max(1, self.grace_seconds * 9 // 10)


class CheckpointPolicy(YamlModel):
    """When to save and what to keep (specification rows I1 and I6): whichever of time or steps comes first.

    `keep_last` counts the newest checkpoints; the best one stays besides, and one from before a loss that may be diverging.
    A run that resumes from `best` or from a step leaves all its checkpoints as they are, and writes those that follow below
    `from-STEP`.
    """

    interval: Duration = "1h"
    interval_steps: int = Field(1000, ge=1, le=MAX_STEPS, description="500 at most of a run that goes on after it diverged")
    keep_last: int = Field(3, ge=1, le=MAX_COUNT)
    save_on_preempt: bool = Field(True, description="on SIGTERM, of the last whole step, within the grace")
    # Left out where it is not set: runs that were made before there was this key keep their digests.
    compression: Literal["zstd"] | None = Field(
        None, exclude_if=lambda value: value is None, description="of what is uploaded"
    )
    resume_from: Literal["latest", "best"] | Annotated[int, Field(ge=1)] = "latest"
    storage: uris.CheckpointTemplate | None = Field(
        None, exclude=True, description="where every run keeps its checkpoints, for who writes it down"
    )

    def for_schedule(self, schedule: Schedule) -> Self:
        """The policy of a job: with the interval that it asks for, else every 20 minutes where it may be preempted (Z15)."""
        interval = schedule.checkpoint_interval
        if interval is None and schedule.preemptible:
            interval = min(self.interval, PREEMPTIBLE_INTERVAL, key=parse_duration)
        return self.model_copy(update={"interval": interval}) if interval else self

    def for_unstable_run(self) -> Self:
        """The policy of a run that goes on after it diverged, and may do so again: as the specification has it (row I6)."""
        return self.model_copy(update={"interval_steps": min(self.interval_steps, UNSTABLE_INTERVAL_STEPS)})


class Tracking(FrozenModel):
    """The run that a program logs to."""

    uri: str
    run_id: str


class Job(FrozenModel):
    """Everything a program needs, and the only thing that it is given."""

    id: str
    program: Program
    inputs: dict[str, Artifact] = Field(default_factory=dict)
    parameters: dict[str, JsonValue] = Field(default_factory=dict)
    outputs: dict[str, str] = Field(default_factory=dict, description="role -> logical URI to publish under")
    result_uri: str = Field(description="logical URI of the file that holds the Result once the job has ended well")
    store: StoreAddress
    work_dir: str = Field(
        "", description="scratch folder of this job, set by the backend; survives a restart on the same machine"
    )
    cache_dir: str = Field(description="folder shared by jobs, for content-addressed downloads")
    tracking: Tracking | None = None
    hardware: Hardware = Hardware()
    distributed: Distributed | None = None
    pods: int = Field(1, ge=1, description="on a cluster, of programs that can share their work through the store: prepare")
    checkpoint: CheckpointPolicy = CheckpointPolicy()
    schedule: Schedule = Schedule()
    rendering: KeptRendering = CURRENT_RENDERING
    # Left out where they are empty: jobs that were submitted before there were these keys keep their documents.
    env: Environment = Field({}, exclude_if=lambda value: not value, description="more variables of the program")
    pod: PodSettings = Field(PodSettings(), exclude_if=lambda value: value == PodSettings())

    _restore_rendering = model_validator(mode="before")(restore_rendering)

    @property
    def gpus(self) -> int:
        """Of all its nodes."""
        return self.hardware.gpus * (self.distributed.num_nodes if self.distributed else 1)

    @property
    def work_digest(self) -> str:
        """SHA-256 of what the job computes, leaving out where it runs: equal work has an equal digest."""
        computed = {"program", "inputs", "parameters", "outputs"}
        return hashlib.sha256(canonical_json(self.model_dump(mode="json", include=computed))).hexdigest()


class Machine(FrozenModel):
    """On what a program computed, as far as it decides the last bits of a number. `threads` are of one operation."""

    python: str
    packages: dict[str, str] = Field(default_factory=dict, description="version by name, of those that compute")
    processor: str
    gpus: tuple[str, ...] = ()
    threads: int


class Result(FrozenModel):
    """What a program made. Written atomically as the last act: a job without a result has not ended well.

    JSON has no NaN and no infinity: as a metric they are refused here, rather than written in a form that nobody reads.
    """

    work_digest: str
    artifacts: dict[str, Artifact] = Field(default_factory=dict)
    metrics: dict[str, FiniteFloat] = Field(default_factory=dict)
    facts: dict[str, JsonValue] = Field(default_factory=dict)
    machine: Machine | None = Field(None, description="where it was made; added as the program ends")


class BadConfiguration(Exception):
    """The user's input is wrong; the message is one line that says what to do. Programs exit 78 on it, without retry."""


EXIT_FILE = "exit.json"
"""In the work folder of a job: why its program ended by itself without a result, for the supervisor."""

OUT_OF_MEMORY_FILE = "memory_ran_out"
"""In the work folder of a job: the kernel ended its program for want of memory, so that the program could not say so."""

FAILED_FILE = "failed"
"""In the work folder of a job: its program has failed on this node, and stores what it leaves together with other nodes."""

EXIT_BAD_CONFIGURATION = 78
"""EX_CONFIG of sysexits.h: restarting would not help (facts: Kubernetes fails such a job at once)."""

EXIT_PREEMPTED = 143
"""Ended on SIGTERM after an emergency checkpoint: restarting goes on from there."""

EXIT_RESTART = 75
"""EX_TEMPFAIL of sysexits.h: ended by itself, having written down what to do otherwise; restarting goes on with that."""
