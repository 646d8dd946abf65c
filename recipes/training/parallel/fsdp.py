"""Save and load weights and optimizer state sharded by FSDP2 and tensor parallelism."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from recipes.checkpoints.node_parts import ROWS_MARKER, shard_rows
from recipes.contracts.job import BadConfiguration
from recipes.training.checkpointing.sharded_safetensors import RowRange, ShardedTensors, write_rows
from recipes.training.checkpointing.staging import Staging
from recipes.training.parallel.process_group import ProcessGroup

WEIGHTS_STEM, OPTIMIZER_STEM = "model", "optimizer"


def tie_weights(model: torch.nn.Module) -> None:
    """Make all modules that use a tied weight read the storage that is trained.

    Embedding and head are in two FSDP2 groups. If rows do not divide evenly, each group pads the last process's rows in a
    copy of its own (torch 2.13): the head's copy was never trained, and training went wrong without an error.
    """
    sharded: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not sharded:
        return
    sharded[0]._get_fsdp_state()._lazy_init()  # pads the shards; the first module is the whole model
    states = dict.fromkeys(module._get_fsdp_state() for module in sharded)  # some modules share one
    parts = [part for state in states for group in state._fsdp_param_groups for part in group.fsdp_params]
    read = {id(part.sharded_param): part._sharded_param_data for part in parts if reads_trained_storage(part)}
    for part in parts:
        part._sharded_param_data = read[id(part.sharded_param)]


def reads_trained_storage(part: Any) -> bool:
    read, trained = part._sharded_param_data, part.sharded_param.to_local()
    return bool(read.untyped_storage().data_ptr() == trained.untyped_storage().data_ptr())


def save_weights(model: torch.nn.Module, folder: Path, group: ProcessGroup, staging: Staging) -> None:
    write_local_rows(named_weights(model), WEIGHTS_STEM, folder, group, staging)


def load_weights(model: torch.nn.Module, folder: Path) -> None:
    """Load weights from a sharded checkpoint or a whole model.

    Raises:
        BadConfiguration: they belong to another model.
    """
    files = ShardedTensors(sorted(folder.glob(f"{WEIGHTS_STEM}*.safetensors")))
    for name, weight in named_weights(model).items():
        if files.shape(name) != weight.shape:
            raise BadConfiguration(f"the weights in {folder} do not fit the recipe: {name} has another shape")
        local_tensor(weight).copy_(read_local_part(weight, name, files))


def save_optimizer(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path, group: ProcessGroup, staging: Staging
) -> None:
    """Save this process's optimizer state.

    Scalars, such as the step count, are equal in all processes.
    """
    states = {
        f"{key}/{name}": value for name, state in optimizer_states(model, optimizer).items() for key, value in state.items()
    }
    write_local_rows(states, OPTIMIZER_STEM, folder, group, staging)


def load_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    files = ShardedTensors(sorted(folder.glob(f"{OPTIMIZER_STEM}{ROWS_MARKER}*.safetensors")))
    keys = sorted({name.split("/", 1)[0] for name in files.names})
    state = {
        place: {key: shard_like(weight, f"{key}/{name}", files) for key in keys}
        for place, (name, weight) in enumerate(optimizer_weights(optimizer, model).items())
    }
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def named_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return each tied weight once, in sharded form.

    After an evaluation some weights are still gathered.
    """
    spread = model.state_dict()
    return {name: spread[name] for name, _ in model.named_parameters()}


def optimizer_weights(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights of an optimizer in its own order, by name."""
    model.state_dict()  # reshards gathered weights: the optimizer refers to the sharded ones
    names = {id(weight): name for name, weight in model.named_parameters()}
    return {names[id(weight)]: weight for group in optimizer.param_groups for weight in group["params"]}


def optimizer_states(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    return {name: optimizer.state[weight] for name, weight in optimizer_weights(optimizer, model).items()}


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_slices(tensor: torch.Tensor) -> tuple[slice, ...]:
    """Return the position of this process's shard in the whole tensor, per dimension."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    described: Any = tensor
    [chunk] = described.__create_chunk_list__()
    return tuple(slice(first, first + size) for first, size in zip(chunk.offsets, chunk.sizes, strict=True))


def read_local_part(tensor: torch.Tensor, name: str, files: ShardedTensors) -> torch.Tensor:
    """Read this process's shard of a tensor from files."""
    rows, *others = local_slices(tensor)
    return files.read(name, range(rows.start, rows.stop))[:, *others].contiguous()


def write_local_rows(
    tensors: Mapping[str, torch.Tensor], stem: str, folder: Path, group: ProcessGroup, staging: Staging
) -> None:
    """Write this process's rows.

    Replicated tensors are written by the first process that holds them, those of a pipeline stage by that stage.
    """
    written: dict[str, torch.Tensor] = {}
    before = {name for names in group.all_gather([*tensors])[: group.rank] for name in names} if group.is_pipelined else ()
    places: dict[str, RowRange] = {}
    for name, tensor in tensors.items():
        rows, first = local_rows(tensor)
        if is_writer(tensor, group) and name not in before:
            written[name] = rows
            places |= {name: RowRange(first, len(tensor))} if rows.dim() else {}
    write_rows(written, stem, folder, group, staging, places)


def local_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return whole rows of this process and the number of the first.

    Column shards are exchanged for rows.
    """
    local_shard = local_tensor(tensor)
    if not isinstance(tensor, DTensor) or not tensor.dim():
        return local_shard, 0
    first = local_slices(tensor)[0].start
    if not any(place.is_shard(1) for place in tensor.placements):
        return local_shard, first
    others = tensor.device_mesh.get_group("tp")
    columns = [
        torch.empty(local_shard.shape, dtype=local_shard.dtype, device=local_shard.device) for _ in range(others.size())
    ]
    dist.all_gather(columns, local_shard.contiguous(), others)
    rows = shard_rows(len(local_shard), others.rank(), others.size())
    # To host memory: on the GPU they would need room next to the model.
    return torch.cat([some[rows.start : rows.stop].cpu() for some in columns], dim=1), first + rows.start


def is_writer(tensor: torch.Tensor, group: ProcessGroup) -> bool:
    if group.is_pipelined or not tensor.dim():  # scalars are in every file, so that a reader needs no other file for them
        return True
    if not isinstance(tensor, DTensor):
        return group.is_leader
    return tensor.device_mesh.size() == group.size or group.rank % group.model_parallel_size == 0


def shard_like(weight: torch.Tensor, name: str, files: ShardedTensors) -> torch.Tensor:
    """Read a tensor sharded like the weight it belongs to."""
    if not files.shape(name):
        return files.read(name)
    local_shard = read_local_part(weight, name, files)
    if not isinstance(weight, DTensor):
        return local_shard
    mesh, placements = weight.device_mesh, weight.placements
    local_shard = local_shard.to(weight.device)
    return DTensor.from_local(local_shard, mesh, placements, run_check=False, shape=weight.shape, stride=weight.stride())
