"""How a recipe's processes start and share a model: torchrun's shape, and what shards it (rows H1, Z24). Pure."""

from typing import Any

from recipes.recipe import Recipe


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
    if recipe.distributed and recipe.distributed.strategy.startswith("deepspeed"):
        return {"deepspeed": zero(recipe, stage=int(recipe.distributed.strategy[-1]))}
    return {}


def fully_sharded(recipe: Recipe) -> dict[str, Any] | None:
    """transformers' DistributedConfig for FSDP2, which is `full_shard`: a block's weights are shards again once used.

    Shards that are trained are of float32; in bfloat16 a block's weights are gathered and compute.
    """
    if recipe.distributed and recipe.distributed.strategy == "fsdp" and recipe.processes > 1:
        mixed = recipe.method == "full" and recipe.computing_dtype == "bfloat16"
        return {"fsdp_size": recipe.processes, "fsdp_mixed_precision": mixed}
    return None


def zero(recipe: Recipe, stage: int) -> dict[str, Any]:
    """DeepSpeed's configuration for ZeRO; the optimizer is the trainer's."""
    precision = {"bfloat16": "bf16", "float16": "fp16"}.get(recipe.computing_dtype)
    return {
        "train_micro_batch_size_per_gpu": recipe.batch_size,
        "gradient_accumulation_steps": recipe.gradient_accumulation,
        "gradient_clipping": recipe.max_grad_norm,
        "zero_optimization": {"stage": stage, "overlap_comm": True, "contiguous_gradients": True},
        **({precision: {"enabled": True}} if precision else {}),
    }
