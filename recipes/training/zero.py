"""Weights and optimizer state that DeepSpeed has spread over the processes (ZeRO stages 2 and 3): whole, by name, in a
checkpoint, so that any number of processes goes on.

DeepSpeed is an extra of the product, which nothing but these strategies needs. Every function is called by all processes at
once. What DeepSpeed would save itself are files of one number of processes, which only that many can read.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

from recipes.launch import zero, zero_stage
from recipes.recipe import Recipe

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps of each weight, by torch's names."""


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


def save_state(engine: Any, file: Path, *, leads: bool) -> None:
    """Weights in float32 and their moments. The leader alone writes."""
    from deepspeed import utils

    link_moments(engine.optimizer)
    found: dict[str, Any] = {"step": next(iter(engine.optimizer.optimizer.state.values()))["step"].cpu(), "weights": {}}
    for name, parameter in trained(engine):
        whole = {"weight": utils.safe_get_full_fp32_param(parameter)}
        whole |= {key: utils.safe_get_full_optimizer_state(parameter, key) for key in MOMENTS}
        if leads:
            found["weights"][name] = {key: value.cpu() for key, value in whole.items()}
    if leads:
        torch.save(found, file)


def load_state(engine: Any, file: Path) -> None:
    """What `save_state` saved, on any number of processes. Each reads its own part."""
    saved = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    begin_moments(engine.optimizer, saved["step"])
    for name, parameter in trained(engine):
        put(parameter, **saved["weights"][name])


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


def put(parameter: torch.nn.Parameter, *, weight: torch.Tensor, **moments: torch.Tensor) -> None:
    """Set a weight, its copy in float32 and its moments."""
    import deepspeed
    from deepspeed import utils

    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
        parameter.copy_(weight)
    if not hasattr(parameter, "ds_tensor"):
        utils.safe_set_full_fp32_param(parameter, weight)
        for key, moment in moments.items():
            utils.safe_set_full_optimizer_state(parameter, moment, key)
        return
    size, rank = parameter.ds_tensor.numel(), dist.get_rank()
    utils.safe_set_local_fp32_param(parameter, part_of(weight, size, rank))
    for key, moment in moments.items():
        utils.safe_set_local_optimizer_state(parameter, part_of(moment, size, rank), key)


def part_of(whole: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """The `size` elements of a tensor that are a process's, with zeros after its end."""
    part = whole.flatten()[rank * size :][:size]
    return torch.nn.functional.pad(part, (0, size - part.numel()))


def load_weights(model: torch.nn.Module, folder: Path, *, leads: bool) -> None:
    """Weights of a file into a model that was spread as it was read (stage 3). The leader alone reads."""
    import deepspeed

    weights: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("model*.safetensors")) if leads else ():
        weights |= load_file(file)
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
            if leads:
                parameter.copy_(weights[name])


def trained(engine: Any) -> Iterator[tuple[str, Any]]:
    return ((name, parameter) for name, parameter in engine.module.named_parameters() if parameter.requires_grad)
