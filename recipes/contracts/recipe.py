"""Recipes: named fine-tuning configurations, one YAML file each."""

from collections.abc import Mapping
from math import gcd
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ValidationError, field_validator, model_validator

from recipes.contracts.divergence import DivergencePolicy
from recipes.contracts.frozen_model import YamlModel
from recipes.contracts.job import MAX_COUNT, MAX_STEPS, BadConfiguration, CheckpointPolicy, Distributed, Hardware
from recipes.contracts.quantities import explain_zero_duration
from recipes.contracts.recipe_references import (
    BaseModelRef,
    learns_from_pairs,
    require_known_objective,
    require_pinned_image,
)
from recipes.contracts.validation_errors import explain_first_error, select_first_error
from recipes.contracts.yaml_reader import find_line, find_named_key, read_yaml_mapping
from recipes.planning.architecture import Architecture
from recipes.planning.gpus import parse_gpu_requirement
from recipes.storage.manifest import canonical_json

RECIPES_FOLDER = Path(__file__).resolve().parents[1]
PREFERENCE_BETA = 0.1


def list_foreign_keys(method: str) -> frozenset[str]:
    """Return the recipe keys that do not apply to a method."""
    if method != "full":
        return frozenset({"dtype"})
    adapter = {"lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules"}
    return frozenset({"base_dtype", "compute_dtype", "double_quant"} | adapter)


class Recipe(YamlModel):
    """A fine-tuning configuration: base model, method and objective, hyperparameters, hardware, checkpoint policy.

    `method` selects the trained weights: `full` all of them, `lora` an adapter on frozen weights, `qlora` the same on
    weights in NF4. `objective` selects the loss.
    """

    name: str = Field(min_length=1)
    description: str
    memory_profile: str = ""
    when_to_use: str = ""
    base_model: BaseModelRef
    architecture: Architecture | None = Field(None, description="the base model's shape, if the assumed one is wrong")
    method: Literal["full", "lora", "qlora"] = "lora"
    objective: str = Field("sft", description="sft, dpo, orpo, or an installed one")
    # Omitted if unset, so that digests of runs from before this key stay the same.
    beta: float | None = Field(
        None,
        gt=0,
        exclude_if=lambda value: value is None,
        description="dpo: penalty for deviating from the base; orpo: weight of the odds ratio; default 0.1",
    )
    # Omitted if unset, so that digests of runs from before this key stay the same.
    image: Annotated[str, AfterValidator(require_pinned_image)] | None = Field(
        None,
        exclude_if=lambda value: value is None,
        description="container image with a tag or a digest; default: scheduler.default_image",
    )
    gpu_requirement: str | None = Field(None, description="total GPUs, such as '8x A100 80GB'; must agree with `hardware`")
    base_dtype: Literal["float16", "bfloat16", "float32", "nf4"] = Field(
        "bfloat16", description="dtype of the frozen weights (lora, qlora)"
    )
    compute_dtype: Literal["float16", "bfloat16", "float32"] | None = Field(None, description="dtype of qlora's arithmetic")
    double_quant: bool = Field(False, description="quantize NF4's constants too (qlora)")
    dtype: Literal["bfloat16", "float32"] | None = Field(
        None, description="dtype of arithmetic and published weights (full); trained weights are float32"
    )
    lora_rank: int = Field(16, ge=1, le=MAX_COUNT)
    lora_alpha: int = Field(32, ge=1, le=MAX_COUNT)
    lora_dropout: float = Field(0.0, ge=0, lt=1)
    lora_target_modules: tuple[str, ...] = ()
    optimizer: Literal["adamw", "adamw_8bit", "paged_adamw"] = "adamw"
    gradient_checkpointing: bool = Field(
        False, description="recompute activations in the backward pass instead of storing them"
    )
    learning_rate: float = Field(gt=0)
    # Omitted if linear, so that digests of runs from before this key stay the same.
    lr_scheduler: Literal["linear", "cosine", "constant"] = Field(
        "linear", exclude_if=lambda value: value == "linear", description="learning_rate after its warm-up"
    )
    warmup_ratio: float = Field(0.0, ge=0, le=1, description="share of max_steps, rounded up")
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    batch_size: int = Field(ge=1, le=MAX_COUNT, description="packed sequences, or pairs, per micro-batch")
    gradient_accumulation: int = Field(1, ge=1, le=MAX_COUNT)
    # Omitted if unset, so that digests of runs from before this key stay the same.
    rows_per_step: int | None = Field(
        None,
        ge=1,
        le=MAX_COUNT,
        exclude_if=lambda value: value is None,
        description="rows per step if the processes cannot divide them evenly: the last micro-batches are smaller or empty",
    )
    max_steps: int = Field(ge=1, le=MAX_STEPS)
    eval_steps: int | None = Field(None, ge=1, le=MAX_STEPS)
    sequence_length: int = Field(ge=8, le=MAX_COUNT, description="tokens per packed sequence")
    system_prompt: str | None = None
    seed: int = Field(42, ge=0, lt=2**32)  # NumPy's range
    hardware: Hardware = Hardware()
    distributed: Distributed | None = None
    checkpoint: CheckpointPolicy = CheckpointPolicy()
    divergence: DivergencePolicy = DivergencePolicy()
    publish: Literal["final", "best"] = Field("final", description="checkpoint whose weights the run publishes")
    estimated_time: str = ""
    estimated_cost: str = ""

    @field_validator("lora_target_modules")
    @classmethod
    def refuse_duplicate_targets(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        """A duplicate would get one adapter, but count as two in memory estimates."""
        for name in value:
            if value.count(name) > 1:
                raise ValueError(f"'{name}' is listed twice: keep one of them")
        return value

    @field_validator("gpu_requirement")
    @classmethod
    def validate_syntax(cls, value: str | None) -> str | None:
        if value is not None:
            parse_gpu_requirement(value)
        return value

    @model_validator(mode="after")
    def validate_method_keys(self) -> Self:
        """Raise ValueError with the key that the method needs or does not have."""
        if self.method == "full":
            given_keys = sorted(
                key for key in list_foreign_keys("full") if getattr(self, key) != Recipe.model_fields[key].default
            )
            if given_keys:
                raise ValueError(f"method full trains all weights and has no {given_keys[0]}: remove it")
            if self.dtype is None:
                raise ValueError("method full needs dtype, for example bfloat16")
            return self
        if self.dtype is not None:
            raise ValueError(f"dtype is a key of method full: method {self.method} has base_dtype")
        if not self.lora_target_modules:
            raise ValueError(f"method {self.method} needs lora_target_modules, for example [q_proj, v_proj]")
        if (self.method == "qlora") != (self.base_dtype == "nf4"):
            raise ValueError("base_dtype nf4 and method qlora belong together: set both or neither")
        if self.method == "qlora" and self.compute_dtype is None:
            raise ValueError("method qlora needs compute_dtype, for example bfloat16")
        if self.method == "lora" and (self.compute_dtype or self.double_quant):
            raise ValueError("compute_dtype and double_quant are keys of method qlora: remove them")
        return self

    @field_validator("objective")
    @classmethod
    def validate_objective(cls, value: str) -> str:
        return require_known_objective(value)

    @model_validator(mode="after")
    def validate_checkpoint_interval(self) -> Self:
        """Reject an interval of zero: every step would save a checkpoint, however long that takes."""
        if problem := explain_zero_duration("checkpoint.interval", self.checkpoint.interval):
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def validate_beta(self) -> Self:
        if self.objective == "sft" and self.beta is not None:
            raise ValueError("beta is a key of the preference objectives dpo and orpo: remove it")
        return self

    @model_validator(mode="after")
    def validate_rows_per_step(self) -> Self:
        """Reject counts for which a micro-batch would be empty in all processes."""
        fewer, most = self.max_rows_per_step - self.batch_size * self.data_parallel, self.max_rows_per_step
        if self.rows_per_step is not None and not fewer < self.rows_per_step <= most:
            raise ValueError(
                f"rows_per_step is {self.rows_per_step}, but batch_size, gradient_accumulation and distributed make "
                f"{fewer + 1} to {most}: make them agree, or remove it"
            )
        return self

    @model_validator(mode="after")
    def validate_hardware(self) -> Self:
        """Check GPU counts: `hardware` counts per node, and `gpu_requirement` is the total."""
        shape = self.distributed
        if shape and self.hardware.gpus and self.hardware.gpus != shape.gpus_per_node:
            raise ValueError(
                f"hardware.gpus is {self.hardware.gpus} and distributed.gpus_per_node {shape.gpus_per_node}: make them equal"
            )
        if self.gpu_requirement is None:
            return self
        required = parse_gpu_requirement(self.gpu_requirement)
        if (self.gpus, self.hardware.gpu_type) != (required.gpus, required.gpu_type):
            found = f"{self.gpus} of {self.hardware.gpu_type or 'no type'}" if self.gpus else "none"
            raise ValueError(
                f"gpu_requirement is {self.gpu_requirement}, but hardware and distributed make {found}: make them agree"
            )
        return self

    @property
    def preference_beta(self) -> float:
        return PREFERENCE_BETA if self.beta is None else self.beta

    @property
    def computing_dtype(self) -> str:
        """The compute dtype, if the processor supports it."""
        return self.dtype or self.compute_dtype or self.base_dtype

    @property
    def trained_role(self) -> str:
        """Role of the run's output, one of `recipes.contracts.results.TRAINED_ROLES`."""
        return "weights" if self.method == "full" else "adapter"

    @property
    def processes(self) -> int:
        """Number of training processes: one per GPU, or as set in `distributed`."""
        return self.distributed.num_nodes * self.distributed.gpus_per_node if self.distributed else 1

    @property
    def gpus(self) -> int:
        """Number of GPUs on all nodes."""
        return self.hardware.gpus * (self.distributed.num_nodes if self.distributed else 1)

    @property
    def tensor_parallel(self) -> int:
        """Number of processes that share each weight and compute a micro-batch together."""
        return self.distributed.tensor_parallel if self.distributed else 1

    @property
    def is_pipelined(self) -> bool:
        """Whether each process holds some of the layers (`recipes.planning.parallel_layout`)."""
        return self.distributed is not None and self.distributed.strategy == "pipeline"

    @property
    def stages(self) -> int:
        return self.processes if self.is_pipelined else 1

    @property
    def model_parallel_size(self) -> int:
        """Number of processes that compute the same rows.

        They hold shards of all weights, or different layers.
        """
        return self.tensor_parallel * self.stages

    @property
    def data_parallel(self) -> int:
        """Number of processes, or groups of them, with different rows."""
        return self.processes // self.model_parallel_size

    def for_processes(self, processes: int) -> Self:
        """Return the recipe for another number of processes, with the same effective batch.

        Nodes keep their size if there are several and they divide evenly, otherwise there is a single node. The micro-batch
        is the largest, up to the recipe's, that divides the batch evenly, if any. Tensor parallelism is reduced to a size
        that divides the processes of a node.

        Raises:
            BadConfiguration: a step has fewer rows than there are processes.
        """
        if processes == self.processes:
            return self
        rows, shape = self.samples_per_step, self.distributed or Distributed()
        nodes = processes // shape.gpus_per_node if shape.num_nodes > 1 and processes % shape.gpus_per_node == 0 else 1
        per_node = processes // nodes
        tensor_parallel = gcd(self.tensor_parallel, per_node)
        data_parallel = 1 if self.is_pipelined else processes // tensor_parallel
        if rows < data_parallel:
            raise BadConfiguration(
                f"recipe '{self.name}': {processes} processes need a row each, but a step has only {rows}: "
                f"use at most {rows * tensor_parallel} processes"
            )
        changed = {
            "rows_per_step": rows,
            "distributed": shape.model_copy(
                update={"num_nodes": nodes, "gpus_per_node": per_node, "tensor_parallel": tensor_parallel}
            ),
            "hardware": self.hardware.model_copy(update={"gpus": per_node if self.hardware.gpus else 0}),
            "gpu_requirement": None,
        }
        return self.model_copy(update=changed).with_max_batch_size(self.batch_size)

    def with_max_batch_size(self, most: int) -> Self:
        """Return the recipe with micro-batches of at most `most` rows and the same effective batch."""
        rows, rest = divmod(self.samples_per_step, self.data_parallel)
        if rest:
            batch = min(most, rows + 1)
            times = -(-self.samples_per_step // (batch * self.data_parallel))
        else:
            batch = next(size for size in range(most, 0, -1) if rows % size == 0)
            times = rows // batch
        stated = self.samples_per_step if rest else None
        return self.model_copy(update={"batch_size": batch, "gradient_accumulation": times, "rows_per_step": stated})

    @property
    def sequences(self) -> int:
        """Number of sequences per micro-batch: two per pair."""
        return self.batch_size * (2 if self.has_pairs else 1)

    @property
    def has_pairs(self) -> bool:
        """Whether the objective learns from pairs."""
        return learns_from_pairs(self.objective)

    @property
    def samples_per_step(self) -> int:
        """The effective batch: dataset rows between two updates of the weights."""
        return self.rows_per_step or self.max_rows_per_step

    @property
    def max_rows_per_step(self) -> int:
        """Capacity of all micro-batches of a step; only the last ones may have empty places."""
        return self.batch_size * self.gradient_accumulation * self.data_parallel

    @property
    def tokens_per_step(self) -> int:
        """Tokens between two updates of the weights, padding included."""
        return self.sequences // self.batch_size * self.samples_per_step * self.sequence_length

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a recipe file.

        Raises:
            BadConfiguration: the file is missing, not YAML in UTF-8 or does not fit the schema; the message has the line and
                the key.
        """
        if path.is_dir():
            raise BadConfiguration(f"{path} is a folder: give the path of a recipe file in it")
        if not path.is_file():
            raise BadConfiguration(f"unknown recipe '{path.stem}': no file {path}. Known recipes: {', '.join(cls.names())}")
        text, document = read_yaml_mapping(path, "`hanzo-ml recipe show` prints them")
        try:
            return cls.model_validate(document)
        except ValidationError as error:
            problem = select_first_error(error)
            line = find_line(text, problem["loc"] or find_named_key(problem["msg"], document))
            raise BadConfiguration(f"{path}{f', line {line}' if line else ''}: {explain_first_error(error, cls)}") from None

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of the installed recipes."""
        return sorted(file.stem for file in RECIPES_FOLDER.glob("*.yaml"))

    @classmethod
    def named(cls, name: str) -> Self:
        """Load an installed recipe by name. Raises BadConfiguration with the available names."""
        if name not in cls.names():  # never a path: a job must not read files of the server
            raise BadConfiguration(f"unknown recipe {name[:100]!r}: use one of {', '.join(cls.names())}")
        return cls.load(RECIPES_FOLDER / f"{name}.yaml")

    def changed(self, parameters: Mapping[str, Any]) -> Self:
        """Apply a job's parameters to the recipe. Raises BadConfiguration with the invalid key."""
        changed = self.model_dump(mode="json") | dict(parameters)
        for key in list_foreign_keys(changed["method"]) - parameters.keys():
            changed.pop(key, None)  # keys of the recipe's original method
        if not {"hardware", "distributed"}.isdisjoint(parameters) and "gpu_requirement" not in parameters:
            changed["gpu_requirement"] = None  # it describes the hardware that was replaced
        try:
            canonical_json(dict(parameters))
            return self.model_validate(changed)
        except ValidationError as error:
            raise BadConfiguration(f"job parameters: {explain_first_error(error, type(self))}") from None
        except ValueError:
            raise BadConfiguration("job parameters: a number is not finite, or a text is not valid UTF-8") from None
