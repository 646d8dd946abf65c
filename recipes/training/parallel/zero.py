"""Save and load weights and optimizer state sharded by DeepSpeed ZeRO."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

from recipes.checkpoints.node_parts import shard_rows
from recipes.contracts.recipe import Recipe
from recipes.planning.parallel_layout import deepspeed_config, zero_stage
from recipes.training.checkpointing.sharded_safetensors import ShardedTensors, write_rows
from recipes.training.checkpointing.staging import Staging
from recipes.training.parallel.fsdp import OPTIMIZER_STEM, WEIGHTS_STEM
from recipes.training.parallel.process_group import ProcessGroup

STEP_KEY = "step"
MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's state by torch's names: a step count and two moments per weight."""


@contextmanager
def shard_while_loading(recipe: Recipe, dtype: torch.dtype) -> Iterator[None]:
    """Shard base models loaded inside the block if the recipe uses ZeRO stage 3."""
    unset_hf_deepspeed_config()  # may be left by an earlier training in this process
    if zero_stage(recipe) != 3:
        yield
        return
    disable_cpu_kernel()
    hf_config = HfDeepSpeedConfig(deepspeed_config(recipe, stage=3, weights_dtype=dtype_name(dtype)))
    yield
    del hf_config  # transformers holds only a weak reference to it


def deepspeed_arguments(recipe: Recipe, model: torch.nn.Module) -> dict[str, Any]:
    """Return DeepSpeed arguments for transformers' TrainingArguments; empty for other strategies."""
    stage = zero_stage(recipe)
    if stage is None:
        return {}
    disable_cpu_kernel()
    # An adapter is float32, independent of its base's dtype.
    holds = next(parameter.dtype for parameter in model.parameters() if parameter.requires_grad)
    found = deepspeed_config(recipe, stage, weights_dtype=dtype_name(holds))
    return {"deepspeed": found, "bf16": "bf16" in found}


def make_inference_engine(model: torch.nn.Module, recipe: Recipe) -> torch.nn.Module:
    """Wrap a frozen model that was sharded while loading (stage 3) for inference."""
    import deepspeed

    disable_cpu_kernel()
    holds = next(model.parameters()).dtype
    engine: torch.nn.Module = deepspeed.initialize(
        model=model, config=deepspeed_config(recipe, stage=3, weights_dtype=dtype_name(holds))
    )[0]
    return engine


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def disable_cpu_kernel() -> None:
    """Disable DeepSpeed's CPU inference kernel, which each new machine would compile for a minute."""
    from deepspeed import ops

    ops.__compatible_ops__["deepspeed_shm_comm"] = False


def save_state(engine: Any, folder: Path, group: ProcessGroup, staging: Staging) -> None:
    """Save float32 weights and moments; each process writes its shard, without gathering."""
    link_moments(engine.optimizer)
    own = {name: found for name, parameter in trained_parameters(engine) if (found := local_state(parameter))}
    write_rows({name: found["weight"] for name, found in own.items()}, WEIGHTS_STEM, folder, group, staging)
    moments = {f"{key}/{name}": found[key] for name, found in own.items() for key in MOMENTS}
    if group.is_leader:
        moments[STEP_KEY] = next(iter(engine.optimizer.optimizer.state.values()))["step"]
    write_rows(moments, OPTIMIZER_STEM, folder, group, staging)


def load_state(engine: Any, folder: Path) -> None:
    """Load what `save_state` saved, on any number of processes; each reads its shard."""
    weights, moments = (ShardedTensors(sorted(folder.glob(f"{stem}-rows-*"))) for stem in (WEIGHTS_STEM, OPTIMIZER_STEM))
    create_moments(engine.optimizer, moments.read(STEP_KEY))
    for name, parameter in trained_parameters(engine):
        restore_parameter(parameter, name, weights, moments)


def local_state(parameter: Any) -> dict[str, torch.Tensor]:
    """Return this process's flat shard of a weight and its moments.

    Empty if it holds none. Shards are in the order of ranks. With stage 3 all have the same size, the last padded with
    zeros.
    """
    from deepspeed import utils

    if hasattr(parameter, "ds_tensor"):
        held_range = local_range(parameter)
        found = {"weight": utils.safe_get_local_fp32_param(parameter)}
        found |= {key: utils.safe_get_local_optimizer_state(parameter, key) for key in MOMENTS}
        return {key: value.flatten()[: len(held_range)] for key, value in found.items()} if held_range else {}
    part = parameter._hp_mapping
    if part is None:
        return {}
    return {"weight": part.hp_fragment, **{key: part.get_optim_state_fragment(key) for key in MOMENTS}}


def local_range(parameter: Any) -> range:
    """Return the range of a weight's elements that this process holds in stage 3."""
    return shard_rows(parameter.ds_numel, dist.get_rank(), dist.get_world_size())


def create_moments(optimizer: Any, step: torch.Tensor) -> None:
    """Allocate the state that an optimizer has only after its first step."""
    sharded = hasattr(optimizer, "fp32_partitioned_groups_flat")
    parts = optimizer.fp32_partitioned_groups_flat if sharded else optimizer.single_partition_of_fp32_groups
    for part in parts:
        moments = {key: torch.zeros_like(part) for key in MOMENTS}
        optimizer.optimizer.state[part] = {"step": step.to(part.device, copy=True), **moments}
    link_moments(optimizer)


def link_moments(optimizer: Any) -> None:
    """Link moments to their weights in stage 2.

    DeepSpeed 0.19 does so for the first parameter group only.
    """
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()


@torch.no_grad()
def restore_parameter(parameter: Any, name: str, weights: ShardedTensors, moments: ShardedTensors) -> None:
    """Set a weight, its float32 copy and its moments."""
    import deepspeed
    from deepspeed import utils

    is_spread = hasattr(parameter, "ds_tensor")
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        if not is_spread or dist.get_rank() == 0:
            parameter.copy_(weights.read(name).view(parameter.shape))
    if is_spread:
        held_range, size = local_range(parameter), parameter.ds_tensor.numel()
        utils.safe_set_local_fp32_param(parameter, pad_numbers(weights.read(name, held_range), size))
        for key in MOMENTS:
            utils.safe_set_local_optimizer_state(
                parameter, pad_numbers(moments.read(f"{key}/{name}", held_range), size), key
            )
    elif part := parameter._hp_mapping:
        first = part.lp_fragment_address.start
        held_range = range(first, first + part.lp_fragment_address.numel)
        part.hp_fragment.copy_(weights.read(name, held_range))
        for key in MOMENTS:
            part.get_optim_state_fragment(key).copy_(moments.read(f"{key}/{name}", held_range))


def pad_numbers(numbers: torch.Tensor, size: int) -> torch.Tensor:
    """Pad with zeros to the size of a shard that extends past the weight's end."""
    return torch.nn.functional.pad(numbers, (0, size - numbers.numel()))


def load_weights(model: torch.nn.Module, folder: Path, *, is_leader: bool) -> None:
    """Load weights of a finished run into a model sharded while loading (stage 3).

    Only the leader reads.
    """
    import deepspeed

    weights = ShardedTensors(sorted(folder.glob("model*.safetensors")) if is_leader else ())
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
            if is_leader:
                parameter.copy_(weights.read(name))


def trained_parameters(engine: Any) -> Iterator[tuple[str, Any]]:
    return ((name, parameter) for name, parameter in engine.module.named_parameters() if parameter.requires_grad)
