"""How a recipe's processes start and share a model: torchrun's shape, and what accelerate is told (rows H1, Z24). Pure."""

from typing import Any

from recipes.recipe import Recipe

BLOCKS = {
    "llama": "LlamaDecoderLayer",
    "mistral": "MistralDecoderLayer",
    "qwen2": "Qwen2DecoderLayer",
    "qwen3": "Qwen3DecoderLayer",
}
"""The class of a block in transformers, by family: the unit that FSDP gathers at a time."""


def torchrun(recipe: Recipe) -> tuple[str, ...]:
    """The command of each node. Compute adds the rendezvous of the gang; without `distributed` one process needs none."""
    program = ("-m", "recipes.train", "job.json")
    shape = recipe.distributed
    if shape is None:
        return ("python", *program)
    return ("torchrun", f"--nnodes={shape.num_nodes}", f"--nproc-per-node={shape.gpus_per_node}", *program)


def sharding(recipe: Recipe, model_type: str) -> dict[str, Any]:
    """The arguments of transformers' TrainingArguments that hand a strategy to accelerate; none for ddp and one process.

    FSDP is version 2. `reshard_after_forward` is `full_shard`: a block's weights are shards again once they were used.
    """
    strategy = recipe.distributed.strategy if recipe.distributed else "ddp"
    if strategy == "fsdp":
        config = {
            "version": 2,
            "reshard_after_forward": True,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": [BLOCKS[model_type]],
            "cpu_ram_efficient_loading": True,
            "state_dict_type": "SHARDED_STATE_DICT",
            "activation_checkpointing": recipe.gradient_checkpointing,
        }
        return {"fsdp": True, "fsdp_config": config}
    if strategy.startswith("deepspeed"):
        return {"deepspeed": zero(recipe, stage=int(strategy[-1]))}
    return {}


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
