"""Weights and optimizer state that FSDP2 has spread over the processes: whole in a checkpoint, so that any number goes on.

Every function is called by all processes at once; the leader alone reads and writes files.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from recipes.recipe import Recipe

GATHER = StateDictOptions(full_state_dict=True, cpu_offload=True)
SCATTER = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
"""Not strict: of tied weights a file holds one."""


def trains_shards(recipe: Recipe) -> bool:
    """Whether what is trained is sharded, where there are several processes; an adapter is whole in every one.

    On one process such a run saves and loads in the same form, for its place may be one of several again.
    """
    return recipe.method == "full" and recipe.distributed is not None and recipe.distributed.strategy == "fsdp"


def save_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer, file: Path, *, leads: bool) -> None:
    state = get_optimizer_state_dict(model, optimizer, options=GATHER)
    if leads:
        torch.save(state, file)


def load_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer, file: Path, *, leads: bool) -> None:
    state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True) if leads else {}
    set_optimizer_state_dict(model, optimizer, state, options=SCATTER)


def load_weights(model: torch.nn.Module, folder: Path, *, leads: bool) -> None:
    weights: dict[str, Any] = {}
    for file in sorted(folder.glob("model*.safetensors")) if leads else ():
        weights |= load_file(file)
    set_model_state_dict(model, weights, options=SCATTER)
