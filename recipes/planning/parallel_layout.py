"""How processes share a model - torchrun, FSDP, ZeRO, tensor and pipeline parallelism."""

import re
from dataclasses import dataclass
from typing import Any

from recipes.contracts.quantities import pluralize
from recipes.contracts.recipe import Recipe
from recipes.planning.architecture import HEAD_NORM_FAMILIES, Architecture, TensorGroup

# How a recipe's processes start and share a model: torchrun's shape, and what shards it (rows H1, Z24). Pure.


def build_torchrun_command(recipe: Recipe) -> tuple[str, ...]:
    """The command of each node. Compute adds the rendezvous of the gang; without `distributed` one process needs none."""
    program = ("-m", "recipes.train", "job.json")
    shape = recipe.distributed
    if shape is None:
        return ("python", *program)
    return ("torchrun", f"--nnodes={shape.num_nodes}", f"--nproc-per-node={shape.gpus_per_node}", *program)


def sharding_arguments(recipe: Recipe) -> dict[str, Any]:
    """What hands a strategy to the libraries, by the name of their argument; none for ddp and one process."""
    if shards := fsdp_config(recipe):
        return {"distributed_config": shards}
    if recipe.is_pipelined:
        return {"pipeline": {"stages": recipe.stages, "micro_batches": recipe.gradient_accumulation}}
    if stage := zero_stage(recipe):
        return {"deepspeed": deepspeed_config(recipe, stage, weights_dtype=recipe.dtype or "float32")}
    return {}


def fsdp_config(recipe: Recipe) -> dict[str, Any] | None:
    """transformers' DistributedConfig for FSDP2, which is `full_shard`: a block's weights are shards again once used.

    Shards that are trained are of float32; in bfloat16 a block's weights are gathered and compute. With tensor parallelism
    they are shards of parts, which are never gathered (Shoeybi et al. 2019).
    """
    if recipe.distributed and recipe.distributed.strategy == "fsdp" and recipe.processes > 1:
        mixed = recipe.method == "full" and recipe.computing_dtype == "bfloat16" and recipe.data_parallel > 1
        parts = {"tp_size": recipe.tensor_parallel} if recipe.tensor_parallel > 1 else {}
        return {"fsdp_size": recipe.data_parallel, "fsdp_mixed_precision": mixed, **parts}
    return None


def holds_whole_model(recipe: Recipe) -> bool:
    """Whether each process has all of the model, and computes its own rows with it."""
    strategy = recipe.distributed.strategy if recipe.distributed else "ddp"
    return zero_stage(recipe) is None and recipe.model_parallel_size == 1 and (strategy == "ddp" or recipe.processes == 1)


def computes_whole_blocks(recipe: Recipe) -> bool:
    """Whether each process computes its own rows with whole blocks: it has them, or gathers each in its turn (fsdp)."""
    return zero_stage(recipe) is None and recipe.model_parallel_size == 1


def trains_shards(recipe: Recipe) -> bool:
    """Whether fsdp shards what is trained, where there are several processes; an adapter is whole in every one.

    On one process such a run saves and loads in the same form, for its place may be one of several again.
    """
    return recipe.method == "full" and recipe.distributed is not None and recipe.distributed.strategy == "fsdp"


def saves_by_name(recipe: Recipe) -> bool:
    """Whether a checkpoint has each weight and its moments by name, and not in the optimizer's own order.

    So any number of processes reads what it needs, one as well; stages do so beside an adapter too.
    """
    return trains_shards(recipe) or recipe.is_pipelined


def saves_parts(recipe: Recipe) -> bool:
    """Whether each of several nodes saves what its processes hold; else the first saves all."""
    return saves_by_name(recipe) or zero_stage(recipe) is not None


def fetches_own_shard(recipe: Recipe) -> bool:
    """Whether a node that goes on needs no more of a checkpoint than what its processes hold.

    DeepSpeed's first process reads all weights; what tensor parallelism cuts in columns is in several files, and what is
    compressed does not say what it has.
    """
    return trains_shards(recipe) and recipe.model_parallel_size == 1 and not recipe.checkpoint.compression


def zero_stage(recipe: Recipe) -> int | None:
    """Of DeepSpeed's ZeRO: with 2 gradients and optimizer states are spread over the processes, with 3 weights too."""
    strategy = recipe.distributed.strategy if recipe.distributed else "ddp"
    return int(strategy[-1]) if strategy.startswith("deepspeed") else None


def deepspeed_config(recipe: Recipe, stage: int, weights_dtype: str) -> dict[str, Any]:
    """DeepSpeed's configuration for ZeRO; the optimizer is the trainer's.

    It holds weights in the type `weights_dtype`, and trains a copy in float32 where that is narrower. Their gradients it
    would add up in `weights_dtype` too, over micro-batches and over processes: in bfloat16 small ones are lost beside the
    sum (row H7).
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


# What tensor parallelism has been tried with: each weight cut into parts, whose processes compute together (row H4).


def find_tensor_parallel_problem(recipe: Recipe, shape: Architecture | None) -> str | None:
    """What keeps a recipe from it, with a base model of that shape where it is known; none where nothing does."""
    parts = recipe.tensor_parallel
    if parts == 1:
        return None
    if recipe.method != "full":  # PEFT 0.21 computes other gradients than one process does, or fails
        return "tensor_parallel cuts weights that are all trained: use method full, or leave it out"
    if shape is None:
        return None
    if shape.model_type in HEAD_NORM_FAMILIES:  # transformers 5.23 sums their gradients once for each micro-batch too often
        return f"tensor_parallel gives norms of heads wrong gradients, which {shape.model_type} has: leave it out"
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if (size := getattr(shape, name)) % parts:
            return f"tensor_parallel {parts} does not divide {name} {size} of the base model: take a number that does"
    return None


# Pipeline parallelism: a model cut into stages of whole layers, one for each process (row H4). Pure.
#
# The first stage has the embedding, the last the norm and the head. A step's micro-batches go through them one after the
# other (GPipe, Huang et al. 2019), and where there are at least as many as stages, backwards as soon as they can (1F1B,
# Narayanan et al. 2019), so that a stage holds activations of as many as there are stages from it on, and not of all.

LAYER_NAME = re.compile(r"(?:^|\.)layers\.([0-9]+)\.")


@dataclass(frozen=True)
class PipelineStage:
    """What one stage has of a model. A `tied` head is the embedding: then the last stage has a copy of that."""

    layers: range
    first: bool
    last: bool
    tied: bool

    @property
    def embeds(self) -> bool:
        return self.first or (self.last and self.tied)

    def owns(self, name: str) -> bool:
        """Whether a weight of that name is one of its own."""
        if found := LAYER_NAME.search(name):
            return int(found[1]) in self.layers
        return self.embeds if "embed_tokens." in name else self.last


class StageShape(Architecture):
    """The shape of one stage: its own layers, how many matrices as large as the embedding, and whether the head is there."""

    embeddings: int
    heads: bool

    @property
    def root_tensors(self) -> tuple[TensorGroup, ...]:
        embedding = TensorGroup("embed_tokens", self.vocab_size * self.hidden_size, self.embeddings)
        norm = TensorGroup("norm", self.hidden_size)
        return (*((embedding,) if self.embeddings else ()), *((norm,) if self.heads else ()))


def assign_stage(rank: int, stages: int, layers: int, *, tied: bool) -> PipelineStage:
    """As many layers in each, or one more in those of the middle: the ends have the embedding and the head besides."""
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
    """Of every stage, in their order."""
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
    """Of how many micro-batches a stage has activations at once."""
    return recipe.stages - rank if runs_1f1b(recipe) else recipe.gradient_accumulation


def pipeline_efficiency(recipe: Recipe) -> float:
    """The part of a step in which a stage computes: it waits for its first micro-batch, and for others after its last."""
    return recipe.gradient_accumulation / (recipe.gradient_accumulation + recipe.stages - 1)


def find_pipeline_problem(recipe: Recipe, shape: Architecture | None) -> str | None:
    """What keeps a recipe from it, with a base model of that shape where it is known; none where nothing does."""
    if not recipe.is_pipelined:
        return None
    if recipe.objective != "sft":
        return f"strategy pipeline has not been tried with objective {recipe.objective}: use sft, or another strategy"
    if recipe.method == "qlora":
        return "strategy pipeline has not been tried beside weights in NF4: use ddp, or method lora"
    if recipe.optimizer != "adamw":
        return f"strategy pipeline keeps the moments of adamw, and not those of {recipe.optimizer}: use optimizer adamw"
    if recipe.samples_per_step != recipe.max_rows_per_step:
        return "strategy pipeline has micro-batches of equally many rows: leave out rows_per_step"
    if shape and recipe.stages > shape.num_hidden_layers:
        layers = shape.num_hidden_layers
        return (
            f"strategy pipeline cuts the base model's {pluralize(layers, 'layer')}: take "
            f"{pluralize(layers, 'process')} at most"
        )
    return None
