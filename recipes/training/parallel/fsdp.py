"""Weights and optimizer state that FSDP2 has spread over the processes: in a checkpoint each writes and reads its own rows.

Nobody gathers them: of 72B parameters they are 864 GB. Any number of processes goes on from them. Every function is called
by all processes at once. Tensor parallelism cuts some weights in columns, which are exchanged for rows to be written.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from recipes.checkpoints.shard_selection import rows_of
from recipes.contracts.job import BadConfiguration
from recipes.training.checkpointing.staging import Staging
from recipes.training.parallel.process_group import Group
from recipes.training.row_files import RowFiles, Rows, write_rows

WEIGHTS, OPTIMIZER = "model", "optimizer"


def tie(model: torch.nn.Module) -> None:
    """Let all that compute with a tied weight read it where it is trained.

    Embedding and head are of two groups of FSDP2. Where rows do not come out even, each pads those of the last process in a
    copy of its own (torch 2.13): that of the head was never trained, and training went wrong without a word.
    """
    sharded: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not sharded:
        return
    sharded[0]._get_fsdp_state()._lazy_init()  # pads; the first is the whole model
    states = dict.fromkeys(module._get_fsdp_state() for module in sharded)  # some modules have one together
    parts = [part for state in states for group in state._fsdp_param_groups for part in group.fsdp_params]
    read = {id(part.sharded_param): part._sharded_param_data for part in parts if reads_what_is_trained(part)}
    for part in parts:
        part._sharded_param_data = read[id(part.sharded_param)]


def reads_what_is_trained(part: Any) -> bool:
    read, trained = part._sharded_param_data, part.sharded_param.to_local()
    return bool(read.untyped_storage().data_ptr() == trained.untyped_storage().data_ptr())


def save_weights(model: torch.nn.Module, folder: Path, group: Group, staging: Staging) -> None:
    write_own(weights_of(model), WEIGHTS, folder, group, staging)


def load_weights(model: torch.nn.Module, folder: Path) -> None:
    """Those of a checkpoint, or of a model that was saved as a whole.

    Raises:
        BadConfiguration: they are of another model.
    """
    files = RowFiles(sorted(folder.glob(f"{WEIGHTS}*.safetensors")))
    for name, weight in weights_of(model).items():
        if files.shape(name) != weight.shape:
            raise BadConfiguration(f"the weights in {folder} do not fit the recipe: {name} is another shape")
        own(weight).copy_(own_part(weight, name, files))


def save_optimizer(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path, group: Group, staging: Staging
) -> None:
    """What is one number for a whole weight, as the number of steps is, all have alike."""
    states = {f"{key}/{name}": value for name, state in states_of(model, optimizer).items() for key, value in state.items()}
    write_own(states, OPTIMIZER, folder, group, staging)


def load_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    files = RowFiles(sorted(folder.glob(f"{OPTIMIZER}*.safetensors")))
    keys = sorted({name.split("/", 1)[0] for name in files.names})
    state = {
        place: {key: spread_like(weight, f"{key}/{name}", files) for key in keys}
        for place, (name, weight) in enumerate(trained_by(optimizer, model).items())
    }
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Each tied weight once, and all spread: after an evaluation the last ones are still gathered."""
    spread = model.state_dict()
    return {name: spread[name] for name, _ in model.named_parameters()}


def trained_by(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights of an optimizer in its own order, by their names."""
    model.state_dict()  # spreads what is gathered: the optimizer knows the spread ones
    names = {id(weight): name for name, weight in model.named_parameters()}
    return {names[id(weight)]: weight for group in optimizer.param_groups for weight in group["params"]}


def states_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    return {name: optimizer.state[weight] for name, weight in trained_by(optimizer, model).items()}


def own(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_places(tensor: torch.Tensor) -> tuple[slice, ...]:
    """Where that is in the whole, in each dimension."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    described: Any = tensor
    [chunk] = described.__create_chunk_list__()
    return tuple(slice(first, first + size) for first, size in zip(chunk.offsets, chunk.sizes, strict=True))


def own_part(tensor: torch.Tensor, name: str, files: RowFiles) -> torch.Tensor:
    """What this process holds of a tensor, as the files have it."""
    rows, *others = own_places(tensor)
    return files.read(name, range(rows.start, rows.stop))[:, *others].contiguous()


def write_own(tensors: Mapping[str, torch.Tensor], stem: str, folder: Path, group: Group, staging: Staging) -> None:
    """What several processes hold alike, the first of them writes; of stages, what the others do not have."""
    written: dict[str, torch.Tensor] = {}
    before = {name for names in group.collect([*tensors])[: group.rank] for name in names} if group.in_stages else ()
    places: dict[str, Rows] = {}
    for name, tensor in tensors.items():
        rows, first = own_rows(tensor)
        if writes(tensor, group) and name not in before:
            written[name] = rows
            places |= {name: Rows(first, len(tensor))} if rows.dim() else {}
    write_rows(written, stem, folder, group, staging, places)


def own_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Whole rows, as many from each process, and the number of the first: for what is cut in columns they are exchanged."""
    held = own(tensor)
    if not isinstance(tensor, DTensor) or not tensor.dim():
        return held, 0
    first = own_places(tensor)[0].start
    if not any(place.is_shard(1) for place in tensor.placements):
        return held, first
    others = tensor.device_mesh.get_group("tp")
    columns = [torch.empty(held.shape, dtype=held.dtype, device=held.device) for _ in range(others.size())]
    dist.all_gather(columns, held.contiguous(), others)
    rows = rows_of(len(held), others.rank(), others.size())
    # On a GPU they would stand beside the model.
    return torch.cat([some[rows.start : rows.stop].cpu() for some in columns], dim=1), first + rows.start


def writes(tensor: torch.Tensor, group: Group) -> bool:
    if group.in_stages or not tensor.dim():  # a number is in every file: who has no other of them needs none for it
        return True
    if not isinstance(tensor, DTensor):
        return group.leads
    return tensor.device_mesh.size() == group.size or group.rank % group.together == 0


def spread_like(weight: torch.Tensor, name: str, files: RowFiles) -> torch.Tensor:
    """A tensor of the files, spread as the weight is that it belongs to."""
    if not files.shape(name):
        return files.read(name)
    held = own_part(weight, name, files)
    if not isinstance(weight, DTensor):
        return held
    mesh, placements = weight.device_mesh, weight.placements
    held = held.to(weight.device)
    return DTensor.from_local(held, mesh, placements, run_check=False, shape=weight.shape, stride=weight.stride())
