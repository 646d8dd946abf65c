"""Distribution of a model over processes: torchrun, FSDP, ZeRO, tensor and pipeline parallelism."""

import re
from dataclasses import dataclass
from typing import Any

from recipes.contracts.quantities import pluralize
from recipes.contracts.recipe import Recipe
from recipes.planning.architecture import HEAD_NORM_FAMILIES, Architecture, TensorGroup

# How a recipe's processes are started, and what shards the model. Pure functions.


def build_torchrun_command(recipe: Recipe) -> tuple[str, ...]:
    """Return the command of each node, without rendezvous options.

    Without `distributed` there is a single process.
    """
    program = ("-m", "recipes.train", "job.json")
    shape = recipe.distributed
    if shape is None:
        return ("python", *program)
    return ("torchrun", f"--nnodes={shape.num_nodes}", f"--nproc-per-node={shape.gpus_per_node}", *program)


def sharding_arguments(recipe: Recipe) -> dict[str, Any]:
    """Return the libraries' arguments for a strategy, by name; empty for ddp and single processes."""
    if shards := fsdp_config(recipe):
        return {"distributed_config": shards}
    if recipe.is_pipelined:
        return {"pipeline": {"stages": recipe.stages, "micro_batches": recipe.gradient_accumulation}}
    if stage := zero_stage(recipe):
        return {"deepspeed": deepspeed_config(recipe, stage, weights_dtype=recipe.dtype or "float32")}
    return {}


def fsdp_config(recipe: Recipe) -> dict[str, Any] | None:
    """Return transformers' DistributedConfig for FSDP2 with `full_shard`: gathered weights are freed after use.

    Trained shards are float32; with bfloat16, blocks are gathered and computed in bfloat16. With tensor parallelism, shards
    are of partial weights, which are never gathered (Shoeybi et al. 2019).
    """
    if recipe.distributed and recipe.distributed.strategy == "fsdp" and recipe.processes > 1:
        mixed = recipe.method == "full" and recipe.computing_dtype == "bfloat16" and recipe.data_parallel > 1
        parts = {"tp_size": recipe.tensor_parallel} if recipe.tensor_parallel > 1 else {}
        return {"fsdp_size": recipe.data_parallel, "fsdp_mixed_precision": mixed, **parts}
    return None


def holds_whole_model(recipe: Recipe) -> bool:
    """Return whether each process holds the whole model and computes different rows."""
    strategy = recipe.distributed.strategy if recipe.distributed else "ddp"
    return zero_stage(recipe) is None and recipe.model_parallel_size == 1 and (strategy == "ddp" or recipe.processes == 1)


def computes_whole_blocks(recipe: Recipe) -> bool:
    """Return whether each process computes different rows with whole blocks, held or gathered (fsdp)."""
    return zero_stage(recipe) is None and recipe.model_parallel_size == 1


def trains_shards(recipe: Recipe) -> bool:
    """Return whether fsdp shards the trained weights; adapters are replicated.

    A single process uses the same checkpoint format, because the run may resume on several again.
    """
    return recipe.method == "full" and recipe.distributed is not None and recipe.distributed.strategy == "fsdp"


def saves_by_name(recipe: Recipe) -> bool:
    """Return whether checkpoints hold weights and moments by name, independent of the optimizer's order.

    Any number of processes can then read what it needs. Pipelines do so for adapters too.
    """
    return trains_shards(recipe) or recipe.is_pipelined


def saves_parts(recipe: Recipe) -> bool:
    """Return whether each node saves what its processes hold; otherwise the first node saves all."""
    return saves_by_name(recipe) or zero_stage(recipe) is not None


def fetches_own_shard(recipe: Recipe) -> bool:
    """Return whether a resuming node only needs its processes' shards of a checkpoint.

    DeepSpeed's first process reads all weights; weights that tensor parallelism splits by columns are in several files, and
    compressed files do not state their contents.
    """
    return trains_shards(recipe) and recipe.model_parallel_size == 1 and not recipe.checkpoint.compression


def zero_stage(recipe: Recipe) -> int | None:
    """Return the ZeRO stage: 2 shards gradients and optimizer states, 3 weights too.

    None without DeepSpeed.
    """
    strategy = recipe.distributed.strategy if recipe.distributed else "ddp"
    return int(strategy[-1]) if strategy.startswith("deepspeed") else None


def deepspeed_config(recipe: Recipe, stage: int, weights_dtype: str) -> dict[str, Any]:
    """Return DeepSpeed's configuration for ZeRO; the optimizer is the trainer's.

    Weights are held in `weights_dtype`, with a float32 master copy if that is narrower. By default gradients would be
    accumulated in `weights_dtype` too, over micro-batches and processes: in bfloat16, small ones would be lost.
    """
    precision = {"bfloat16": "bf16", "float16": "fp16"}.get(weights_dtype)
    sums = {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"} if precision == "bf16" else {}
    gather = {"stage3_gather_16bit_weights_on_model_save": True} if stage == 3 else {}
    return {
        "train_micro_batch_size_per_gpu": recipe.batch_size,
        "gradient_accumulation_steps": recipe.gradient_accumulation,
        "gradient_clipping": recipe.max_grad_norm,
        "zero_optimization": {"stage": stage, "overlap_comm": True, "contiguous_gradients": True, **gather},
        **({precision: {"enabled": True}} if precision else {}),
        **sums,
    }


# Supported configurations of tensor parallelism, which divides each weight among processes that compute together.


def find_tensor_parallel_problem(recipe: Recipe, shape: Architecture | None) -> str | None:
    """Return why a recipe cannot use tensor parallelism with this shape (None: unknown), or None."""
    parts = recipe.tensor_parallel
    if parts == 1:
        return None
    if recipe.method != "full":  # PEFT 0.21 computes different gradients, or fails
        return "tensor_parallel requires that all weights are trained: use method full, or remove it"
    if shape is None:
        return None
    if shape.model_type in HEAD_NORM_FAMILIES:  # transformers 5.23 adds their gradients once too often per micro-batch
        return f"tensor_parallel computes wrong gradients for head norms, which {shape.model_type} has: remove it"
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if (size := getattr(shape, name)) % parts:
            return f"tensor_parallel {parts} does not divide {name} {size} of the base model: use a number that does"
    return None


# Pipeline parallelism: each process holds a stage of whole layers. Pure functions.
#
# The first stage has the embedding, the last one the norm and the head. A step's micro-batches pass through the stages in
# sequence (GPipe, Huang et al. 2019). With at least as many micro-batches as stages, backward passes start early (1F1B,
# Narayanan et al. 2019), so that a stage stores activations of at most as many micro-batches as there are stages from it on.

LAYER_NAME = re.compile(r"(?:^|\.)layers\.([0-9]+)\.")


@dataclass(frozen=True)
class PipelineStage:
    """The part of a model in one stage.

    If the head is `tied`, the last stage has a copy of the embedding.
    """

    layers: range
    first: bool
    last: bool
    tied: bool

    @property
    def embeds(self) -> bool:
        return self.first or (self.last and self.tied)

    def owns(self, name: str) -> bool:
        """Return whether a weight belongs to this stage."""
        if found := LAYER_NAME.search(name):
            return int(found[1]) in self.layers
        return self.embeds if "embed_tokens." in name else self.last


class StageShape(Architecture):
    """The shape of a stage.

    Its layers, number of embedding-sized matrices, and whether it has the head.
    """

    embeddings: int
    heads: bool

    @property
    def root_tensors(self) -> tuple[TensorGroup, ...]:
        embedding = TensorGroup("embed_tokens", self.vocab_size * self.hidden_size, self.embeddings)
        norm = TensorGroup("norm", self.hidden_size)
        return (*((embedding,) if self.embeddings else ()), *((norm,) if self.heads else ()))


def assign_stage(rank: int, stages: int, layers: int, *, tied: bool) -> PipelineStage:
    """Divide layers evenly.

    Extra ones go to the middle, because the ends have the embedding and the head.
    """
    each, more = divmod(layers, stages)
    longer = (stages - more) // 2
    first, stop = (each * place + min(max(place - longer, 0), more) for place in (rank, rank + 1))
    return PipelineStage(
        layers=range(first, stop),
        first=rank == 0,
        last=rank == stages - 1,
        tied=tied,
    )


def stage_shapes(recipe: Recipe, shape: Architecture) -> list[StageShape]:
    """Return the shapes of all stages in order."""
    found = []
    for rank in range(recipe.stages):
        stage = assign_stage(rank, recipe.stages, shape.num_hidden_layers, tied=shape.tie_word_embeddings)
        own = {"num_hidden_layers": len(stage.layers), "head_dim": shape.head_size}
        ends = {"embeddings": stage.embeds + (stage.last and not stage.tied), "heads": stage.last}
        found.append(StageShape.model_validate(shape.model_dump() | own | ends))
    return found


def runs_1f1b(recipe: Recipe) -> bool:
    return recipe.gradient_accumulation >= recipe.stages


def count_micro_batches_in_flight(recipe: Recipe, rank: int) -> int:
    """Return the number of micro-batches whose activations a stage stores at once."""
    return recipe.stages - rank if runs_1f1b(recipe) else recipe.gradient_accumulation


def pipeline_efficiency(recipe: Recipe) -> float:
    """Return the share of a step in which a pipeline stage is busy."""
    return recipe.gradient_accumulation / (recipe.gradient_accumulation + recipe.stages - 1)


def find_pipeline_problem(recipe: Recipe, shape: Architecture | None) -> str | None:
    """Return why a recipe cannot use pipelining with this shape (None: unknown), or None."""
    if not recipe.is_pipelined:
        return None
    if recipe.objective != "sft":
        return f"strategy pipeline does not support objective {recipe.objective}: use sft, or another strategy"
    if recipe.method == "qlora":
        return "strategy pipeline does not support weights in NF4: use ddp, or method lora"
    if recipe.optimizer != "adamw":
        return f"strategy pipeline only supports optimizer adamw, not {recipe.optimizer}: use optimizer adamw"
    if recipe.samples_per_step != recipe.max_rows_per_step:
        return "strategy pipeline needs micro-batches of equal size: remove rows_per_step"
    if shape and recipe.stages > shape.num_hidden_layers:
        layers = shape.num_hidden_layers
        return (
            f"strategy pipeline divides the base model's {pluralize(layers, 'layer')}: use at most "
            f"{pluralize(layers, 'process')}"
        )
    return None
