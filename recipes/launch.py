"""How a recipe's processes start and share a model: torchrun's shape, and what shards it (rows H1, Z24). Pure."""

from typing import Any

from recipes.contracts.recipe import Recipe


def torchrun(recipe: Recipe) -> tuple[str, ...]:
    """The command of each node. Compute adds the rendezvous of the gang; without `distributed` one process needs none."""
    program = ("-m", "recipes.train", "job.json")
    shape = recipe.distributed
    if shape is None:
        return ("python", *program)
    return ("torchrun", f"--nnodes={shape.num_nodes}", f"--nproc-per-node={shape.gpus_per_node}", *program)


def sharding(recipe: Recipe) -> dict[str, Any]:
    """What hands a strategy to the libraries, by the name of their argument; none for ddp and one process."""
    if shards := fully_sharded(recipe):
        return {"distributed_config": shards}
    if recipe.in_stages:
        return {"pipeline": {"stages": recipe.stages, "micro_batches": recipe.gradient_accumulation}}
    if stage := zero_stage(recipe):
        return {"deepspeed": zero(recipe, stage, holds=recipe.dtype or "float32")}
    return {}


def fully_sharded(recipe: Recipe) -> dict[str, Any] | None:
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
    return zero_stage(recipe) is None and recipe.together == 1 and (strategy == "ddp" or recipe.processes == 1)


def computes_whole_blocks(recipe: Recipe) -> bool:
    """Whether each process computes its own rows with whole blocks: it has them, or gathers each in its turn (fsdp)."""
    return zero_stage(recipe) is None and recipe.together == 1


def trains_shards(recipe: Recipe) -> bool:
    """Whether fsdp shards what is trained, where there are several processes; an adapter is whole in every one.

    On one process such a run saves and loads in the same form, for its place may be one of several again.
    """
    return recipe.method == "full" and recipe.distributed is not None and recipe.distributed.strategy == "fsdp"


def saves_by_name(recipe: Recipe) -> bool:
    """Whether a checkpoint has each weight and its moments by name, and not in the optimizer's own order.

    So any number of processes reads what it needs, one as well; stages do so beside an adapter too.
    """
    return trains_shards(recipe) or recipe.in_stages


def saves_parts(recipe: Recipe) -> bool:
    """Whether each of several nodes saves what its processes hold; else the first saves all."""
    return saves_by_name(recipe) or zero_stage(recipe) is not None


def fetches_share(recipe: Recipe) -> bool:
    """Whether a node that goes on needs no more of a checkpoint than what its processes hold.

    DeepSpeed's first process reads all weights; what tensor parallelism cuts in columns is in several files, and what is
    compressed does not say what it has.
    """
    return trains_shards(recipe) and recipe.together == 1 and not recipe.checkpoint.compression


def zero_stage(recipe: Recipe) -> int | None:
    """Of DeepSpeed's ZeRO: with 2 gradients and optimizer states are spread over the processes, with 3 weights too."""
    strategy = recipe.distributed.strategy if recipe.distributed else "ddp"
    return int(strategy[-1]) if strategy.startswith("deepspeed") else None


def zero(recipe: Recipe, stage: int, holds: str) -> dict[str, Any]:
    """DeepSpeed's configuration for ZeRO; the optimizer is the trainer's.

    It holds weights in the type `holds`, and trains a copy in float32 where that is narrower. Their gradients it would add
    up in `holds` too, over micro-batches and over processes: in bfloat16 small ones are lost beside the sum (row H7).
    """
    precision = {"bfloat16": "bf16", "float16": "fp16"}.get(holds)
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
