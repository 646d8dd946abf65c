"""A recipe: one way to fine-tune, as a file in this folder (specification rows G8, L1-L6)."""

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
    """Keys of a recipe that say nothing to a method."""
    if method != "full":
        return frozenset({"dtype"})
    adapter = {"lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules"}
    return frozenset({"base_dtype", "compute_dtype", "double_quant"} | adapter)


class Recipe(YamlModel):
    """How to fine-tune: base model, method x objective, hyperparameters, hardware, checkpoint policy (rows G8, L1-L8, Z23).

    `method` says which weights are trained: `lora` an adapter beside frozen weights, `qlora` the same beside weights in NF4,
    `full` all of them. `objective` says on what.
    """

    name: str = Field(min_length=1)
    description: str
    memory_profile: str = ""
    when_to_use: str = ""
    base_model: BaseModelRef
    architecture: Architecture | None = Field(None, description="the base model's shape, where it is not assumed rightly")
    method: Literal["full", "lora", "qlora"] = "lora"
    objective: str = Field("sft", description="sft, dpo, orpo, or one that is installed")
    # Left out where it is not set: runs that were made before there was this key keep their digests.
    beta: float | None = Field(
        None,
        gt=0,
        exclude_if=lambda value: value is None,
        description="dpo: how much straying from the base costs; orpo: the odds ratio's weight; 0.1 where it is not set",
    )
    # Left out where it is not set: runs that were made before there was this key keep their digests.
    image: Annotated[str, AfterValidator(require_pinned_image)] | None = Field(
        None,
        exclude_if=lambda value: value is None,
        description="of its pods, with a tag or a digest; scheduler.default_image where none is given",
    )
    gpu_requirement: str | None = Field(None, description="all GPUs, as '8x A100 80GB'; agrees with `hardware`")
    base_dtype: Literal["float16", "bfloat16", "float32", "nf4"] = Field(
        "bfloat16", description="of the frozen weights (lora, qlora)"
    )
    compute_dtype: Literal["float16", "bfloat16", "float32"] | None = Field(None, description="of qlora's arithmetic")
    double_quant: bool = Field(False, description="quantize NF4's constants too (qlora)")
    dtype: Literal["bfloat16", "float32"] | None = Field(
        None, description="of arithmetic and of the published weights (full); trained are float32 ones"
    )
    lora_rank: int = Field(16, ge=1, le=MAX_COUNT)
    lora_alpha: int = Field(32, ge=1, le=MAX_COUNT)
    lora_dropout: float = Field(0.0, ge=0, lt=1)
    lora_target_modules: tuple[str, ...] = ()
    optimizer: Literal["adamw", "adamw_8bit", "paged_adamw"] = "adamw"
    gradient_checkpointing: bool = Field(False, description="compute activations a second time instead of keeping them")
    learning_rate: float = Field(gt=0)
    # Left out where it is linear: runs that were made before there was this key keep their digests.
    lr_scheduler: Literal["linear", "cosine", "constant"] = Field(
        "linear", exclude_if=lambda value: value == "linear", description="how learning_rate goes on after its warm-up"
    )
    warmup_ratio: float = Field(0.0, ge=0, le=1, description="of max_steps, rounded up")
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    batch_size: int = Field(ge=1, le=MAX_COUNT, description="packed sequences, or pairs, per micro-batch")
    gradient_accumulation: int = Field(1, ge=1, le=MAX_COUNT)
    # Left out where it is not set: runs that were made before there was this key keep their digests.
    rows_per_step: int | None = Field(
        None,
        ge=1,
        le=MAX_COUNT,
        exclude_if=lambda value: value is None,
        description="where the processes cannot share them evenly: their last micro-batches are smaller, or have no row",
    )
    max_steps: int = Field(ge=1, le=MAX_STEPS)
    eval_steps: int | None = Field(None, ge=1, le=MAX_STEPS)
    sequence_length: int = Field(ge=8, le=MAX_COUNT, description="tokens per packed sequence")
    system_prompt: str | None = None
    seed: int = Field(42, ge=0, lt=2**32)  # as NumPy takes it
    hardware: Hardware = Hardware()
    distributed: Distributed | None = None
    checkpoint: CheckpointPolicy = CheckpointPolicy()
    divergence: DivergencePolicy = DivergencePolicy()
    publish: Literal["final", "best"] = Field("final", description="which checkpoint's weights the run leaves")
    estimated_time: str = ""
    estimated_cost: str = ""

    @field_validator("lora_target_modules")
    @classmethod
    def refuse_duplicate_targets(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        """One that is there twice gets one adapter, and was reckoned to get two."""
        for name in value:
            if value.count(name) > 1:
                raise ValueError(f"'{name}' is there twice: keep one of them")
        return value

    @field_validator("gpu_requirement")
    @classmethod
    def validate_syntax(cls, value: str | None) -> str | None:
        if value is not None:
            parse_gpu_requirement(value)
        return value

    @model_validator(mode="after")
    def validate_method_keys(self) -> Self:
        """Raises ValueError, naming the key that the method needs or does not know."""
        if self.method == "full":
            given_keys = sorted(
                key for key in list_foreign_keys("full") if getattr(self, key) != Recipe.model_fields[key].default
            )
            if given_keys:
                raise ValueError(f"method full trains all weights and has no {given_keys[0]}: remove it")
            if self.dtype is None:
                raise ValueError("method full needs dtype: bfloat16, say")
            return self
        if self.dtype is not None:
            raise ValueError(f"dtype is of method full: method {self.method} has base_dtype")
        if not self.lora_target_modules:
            raise ValueError(f"method {self.method} needs lora_target_modules: [q_proj, v_proj], say")
        if (self.method == "qlora") != (self.base_dtype == "nf4"):
            raise ValueError("base_dtype nf4 and method qlora belong together: give both or none")
        if self.method == "qlora" and self.compute_dtype is None:
            raise ValueError("method qlora needs compute_dtype: bfloat16, say")
        if self.method == "lora" and (self.compute_dtype or self.double_quant):
            raise ValueError("compute_dtype and double_quant are of method qlora: remove them")
        return self

    @field_validator("objective")
    @classmethod
    def validate_objective(cls, value: str) -> str:
        return require_known_objective(value)

    @model_validator(mode="after")
    def validate_checkpoint_interval(self) -> Self:
        """Raises ValueError: with none between two checkpoints each step was one, however long that takes to save."""
        if problem := explain_zero_duration("checkpoint.interval", self.checkpoint.interval):
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def validate_beta(self) -> Self:
        if self.objective == "sft" and self.beta is not None:
            raise ValueError("beta is of objectives that learn preferences, dpo and orpo: remove it")
        return self

    @model_validator(mode="after")
    def validate_rows_per_step(self) -> Self:
        """Without a micro-batch that has no row in any process."""
        fewer, most = self.max_rows_per_step - self.batch_size * self.data_parallel, self.max_rows_per_step
        if self.rows_per_step is not None and not fewer < self.rows_per_step <= most:
            raise ValueError(
                f"rows_per_step is {self.rows_per_step}, but batch_size, gradient_accumulation and distributed make "
                f"{fewer + 1} to {most}: make them agree, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def validate_hardware(self) -> Self:
        """GPUs are counted for each node (row Z24), and `gpu_requirement` is their sum."""
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
        """The type in which the model computes, where the processor can."""
        return self.dtype or self.compute_dtype or self.base_dtype

    @property
    def trained_role(self) -> str:
        """What a run of this recipe leaves, one of `recipes.contracts.results.TRAINED_ROLES`."""
        return "weights" if self.method == "full" else "adapter"

    @property
    def processes(self) -> int:
        """How many processes train at once: one for each GPU, or for each process that `distributed` asks for."""
        return self.distributed.num_nodes * self.distributed.gpus_per_node if self.distributed else 1

    @property
    def gpus(self) -> int:
        """On all nodes."""
        return self.hardware.gpus * (self.distributed.num_nodes if self.distributed else 1)

    @property
    def tensor_parallel(self) -> int:
        """How many processes hold a part of each weight, and compute a micro-batch together."""
        return self.distributed.tensor_parallel if self.distributed else 1

    @property
    def is_pipelined(self) -> bool:
        """Whether the processes have some of the layers each (`recipes.planning.parallel_layout`)."""
        return self.distributed is not None and self.distributed.strategy == "pipeline"

    @property
    def stages(self) -> int:
        return self.processes if self.is_pipelined else 1

    @property
    def model_parallel_size(self) -> int:
        """How many processes compute the same rows: each with a part of every weight, or with some of the layers."""
        return self.tensor_parallel * self.stages

    @property
    def data_parallel(self) -> int:
        """How many processes, or groups of them, have rows of their own."""
        return self.processes // self.model_parallel_size

    def for_processes(self, processes: int) -> Self:
        """The same effective batch on another number of processes: of as large nodes, where there are several and they come
        out even, else all of one.

        The micro-batch is the largest, up to the recipe's, with which it comes out even, where it can. As many share a
        weight as come out even too, and no more than before.

        Raises:
            BadConfiguration: a step has not a row for each.
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
                f"recipe '{self.name}': a row for each of {processes} processes is more than the {rows} of a step: "
                f"take {rows * tensor_parallel} of them at most"
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
        """The same effective batch on as many processes, in the largest micro-batches of up to so many rows."""
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
        """What the model reads at once in a process: of each pair, both answers."""
        return self.batch_size * (2 if self.has_pairs else 1)

    @property
    def has_pairs(self) -> bool:
        """Whether what it learns from are pairs."""
        return learns_from_pairs(self.objective)

    @property
    def samples_per_step(self) -> int:
        """The effective batch: rows of the dataset between two updates of the weights."""
        return self.rows_per_step or self.max_rows_per_step

    @property
    def max_rows_per_step(self) -> int:
        """Of rows, in the micro-batches of all processes; a row stands in each but for the last ones, if any."""
        return self.batch_size * self.gradient_accumulation * self.data_parallel

    @property
    def tokens_per_step(self) -> int:
        """Tokens between two updates of the weights, padding included."""
        return self.sequences // self.batch_size * self.samples_per_step * self.sequence_length

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a recipe file.

        Raises:
            BadConfiguration: the file is missing, is no YAML in UTF-8 or does not fit the schema; the message names the
                line and the key.
        """
        if path.is_dir():
            raise BadConfiguration(f"{path} is a folder: name a recipe's file in it")
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
        """The recipes that this installation has."""
        return sorted(file.stem for file in RECIPES_FOLDER.glob("*.yaml"))

    @classmethod
    def named(cls, name: str) -> Self:
        """A recipe by the name of its file. Raises BadConfiguration, naming the recipes there are."""
        if name not in cls.names():  # a path is no name: a job must not read files of the server
            raise BadConfiguration(f"unknown recipe {name[:100]!r}: use one of {', '.join(cls.names())}")
        return cls.load(RECIPES_FOLDER / f"{name}.yaml")

    def changed(self, parameters: Mapping[str, Any]) -> Self:
        """The recipe with some of its keys changed by a job. Raises BadConfiguration, naming the key that does not fit."""
        changed = self.model_dump(mode="json") | dict(parameters)
        for key in list_foreign_keys(changed["method"]) - parameters.keys():
            changed.pop(key, None)  # of the method that the recipe had before
        if not {"hardware", "distributed"}.isdisjoint(parameters) and "gpu_requirement" not in parameters:
            changed["gpu_requirement"] = None  # it spoke of the hardware that is no longer asked for
        try:
            canonical_json(dict(parameters))
            return self.model_validate(changed)
        except ValidationError as error:
            raise BadConfiguration(f"job parameters: {explain_first_error(error, type(self))}") from None
        except ValueError:
            raise BadConfiguration("job parameters: a number is not finite, or a text holds half a character") from None
