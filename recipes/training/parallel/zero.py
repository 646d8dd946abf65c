"""Weights and optimizer state that DeepSpeed has spread over the processes (ZeRO stages 2 and 3): in a checkpoint each
writes the numbers that it holds of each, by name, and any number of processes goes on from them.

DeepSpeed is an extra of the product, which nothing but these strategies needs. Every function is called by all processes at
once. What DeepSpeed would save itself are files of one number of processes, which only that many can read.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

from recipes.checkpoints.shard_selection import rows_of
from recipes.contracts.recipe import Recipe
from recipes.launch import zero, zero_stage
from recipes.training.checkpointing.staging import Staging
from recipes.training.parallel.fsdp import OPTIMIZER, WEIGHTS
from recipes.training.parallel.process_group import Group
from recipes.training.row_files import RowFiles, write_rows

STEP = "step"
MOMENTS = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps of each weight, by torch's names; and of all, how many steps it did."""


@contextmanager
def spread_as_they_are_read(recipe: Recipe, dtype: torch.dtype) -> Iterator[None]:
    """Base models that are loaded inside hold one process's part of each weight with stage 3, and are whole otherwise."""
    unset_hf_deepspeed_config()  # of a training that may be over
    if zero_stage(recipe) != 3:
        yield
        return
    begin()
    asked = HfDeepSpeedConfig(zero(recipe, stage=3, holds=name_of(dtype)))
    yield
    del asked  # the library knows it for as long as somebody holds it


def configuration(recipe: Recipe, model: torch.nn.Module) -> dict[str, Any]:
    """Arguments of transformers' TrainingArguments; none where the strategy is another."""
    stage = zero_stage(recipe)
    if stage is None:
        return {}
    begin()
    # An adapter is in float32, whatever its base is held in.
    holds = next(parameter.dtype for parameter in model.parameters() if parameter.requires_grad)
    found = zero(recipe, stage, holds=name_of(holds))
    return {"deepspeed": found, "bf16": "bf16" in found}


def gathering(model: torch.nn.Module, recipe: Recipe) -> torch.nn.Module:
    """A model that was spread as it was read (stage 3) and is not trained, so that it computes."""
    import deepspeed

    begin()
    holds = next(model.parameters()).dtype
    engine: torch.nn.Module = deepspeed.initialize(model=model, config=zero(recipe, stage=3, holds=name_of(holds)))[0]
    return engine


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def begin() -> None:
    """DeepSpeed without its kernel for inference on a CPU, which every new machine would compile for a minute."""
    from deepspeed import ops

    ops.__compatible_ops__["deepspeed_shm_comm"] = False


def save_state(engine: Any, folder: Path, group: Group, staging: Staging) -> None:
    """Weights in float32 and their moments: each process writes the numbers that it holds, and nobody gathers them."""
    link_moments(engine.optimizer)
    own = {name: found for name, parameter in trained(engine) if (found := own_numbers(parameter))}
    write_rows({name: found["weight"] for name, found in own.items()}, WEIGHTS, folder, group, staging)
    moments = {f"{key}/{name}": found[key] for name, found in own.items() for key in MOMENTS}
    if group.leads:
        moments[STEP] = next(iter(engine.optimizer.optimizer.state.values()))["step"]
    write_rows(moments, OPTIMIZER, folder, group, staging)


def load_state(engine: Any, folder: Path) -> None:
    """What `save_state` saved, on any number of processes. Each reads its own part."""
    weights, moments = (RowFiles(sorted(folder.glob(f"{stem}-rows-*"))) for stem in (WEIGHTS, OPTIMIZER))
    begin_moments(engine.optimizer, moments.read(STEP))
    for name, parameter in trained(engine):
        put(parameter, name, weights, moments)


def own_numbers(parameter: Any) -> dict[str, torch.Tensor]:
    """What a process holds of a weight and of its moments, as one row of numbers; nothing where it holds none.

    Ranks follow each other in the order of the numbers. With stage 3 all hold equally many, the last with zeros at its end.
    """
    from deepspeed import utils

    if hasattr(parameter, "ds_tensor"):
        here = own_range(parameter)
        found = {"weight": utils.safe_get_local_fp32_param(parameter)}
        found |= {key: utils.safe_get_local_optimizer_state(parameter, key) for key in MOMENTS}
        return {key: value.flatten()[: len(here)] for key, value in found.items()} if here else {}
    part = parameter._hp_mapping
    if part is None:
        return {}
    return {"weight": part.hp_fragment, **{key: part.get_optim_state_fragment(key) for key in MOMENTS}}


def own_range(parameter: Any) -> range:
    """Which of a weight's numbers a process holds, with stage 3."""
    return rows_of(parameter.ds_numel, dist.get_rank(), dist.get_world_size())


def begin_moments(optimizer: Any, step: torch.Tensor) -> None:
    """Room for what an optimizer has after its first step, and a new one has not."""
    sharded = hasattr(optimizer, "fp32_partitioned_groups_flat")
    parts = optimizer.fp32_partitioned_groups_flat if sharded else optimizer.single_partition_of_fp32_groups
    for part in parts:
        moments = {key: torch.zeros_like(part) for key in MOMENTS}
        optimizer.optimizer.state[part] = {"step": step.to(part.device, copy=True), **moments}
    link_moments(optimizer)


def link_moments(optimizer: Any) -> None:
    """Let moments be found by their weight, with stage 2: DeepSpeed 0.19 does so for the first group of weights alone."""
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()


@torch.no_grad()
def put(parameter: Any, name: str, weights: RowFiles, moments: RowFiles) -> None:
    """Set a weight, its copy in float32 and its moments."""
    import deepspeed
    from deepspeed import utils

    is_spread = hasattr(parameter, "ds_tensor")
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        if not is_spread or dist.get_rank() == 0:
            parameter.copy_(weights.read(name).view(parameter.shape))
    if is_spread:
        here, size = own_range(parameter), parameter.ds_tensor.numel()
        utils.safe_set_local_fp32_param(parameter, filled(weights.read(name, here), size))
        for key in MOMENTS:
            utils.safe_set_local_optimizer_state(parameter, filled(moments.read(f"{key}/{name}", here), size), key)
    elif part := parameter._hp_mapping:
        first = part.lp_fragment_address.start
        here = range(first, first + part.lp_fragment_address.numel)
        part.hp_fragment.copy_(weights.read(name, here))
        for key in MOMENTS:
            part.get_optim_state_fragment(key).copy_(moments.read(f"{key}/{name}", here))


def filled(numbers: torch.Tensor, size: int) -> torch.Tensor:
    """With zeros after their end: what a process holds past the end of a weight."""
    return torch.nn.functional.pad(numbers, (0, size - numbers.numel()))


def load_weights(model: torch.nn.Module, folder: Path, *, leads: bool) -> None:
    """Weights of a run that has ended into a model that was spread as it was read (stage 3). The leader alone reads."""
    import deepspeed

    weights = RowFiles(sorted(folder.glob("model*.safetensors")) if leads else ())
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
            if leads:
                parameter.copy_(weights.read(name))


def trained(engine: Any) -> Iterator[tuple[str, Any]]:
    return ((name, parameter) for name, parameter in engine.module.named_parameters() if parameter.requires_grad)
