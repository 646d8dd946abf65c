"""Weights and optimizer state that FSDP2 has spread over the processes: in a checkpoint each writes and reads its own rows.

Nobody gathers them: of 72B parameters they are 864 GB. Any number of processes goes on from them. Every function is called
by all processes at once.
"""

from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from recipes.schema import BadConfiguration
from recipes.training.group import Group
from recipes.training.row_files import RowFiles, rows_of, write_rows

WEIGHTS, OPTIMIZER = "model", "optimizer"


def save_weights(model: torch.nn.Module, folder: Path, group: Group) -> None:
    write_rows({name: own_rows(weight) for name, weight in weights_of(model).items()}, WEIGHTS, folder, group)


def load_weights(model: torch.nn.Module, folder: Path, group: Group) -> None:
    """Those of a checkpoint, or of a model that was saved as a whole.

    Raises:
        BadConfiguration: they are of another model.
    """
    files = RowFiles(sorted(folder.glob(f"{WEIGHTS}*.safetensors")))
    for name, weight in weights_of(model).items():
        if files.shape(name) != weight.shape:
            raise BadConfiguration(f"the weights in {folder} do not fit the recipe: {name} is another shape")
        own_rows(weight).copy_(files.read(name, rows_of(len(weight), group.rank, group.size)))


def save_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path, group: Group) -> None:
    """What is one number for a whole weight, as the number of steps is, is the leader's."""
    states = {f"{key}/{name}": value for name, state in states_of(model, optimizer).items() for key, value in state.items()}
    own = {name: own_rows(value) for name, value in states.items() if value.dim() or group.leads}
    write_rows(own, OPTIMIZER, folder, group)


def load_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path, group: Group) -> None:
    files = RowFiles(sorted(folder.glob(f"{OPTIMIZER}*.safetensors")))
    keys = sorted({name.split("/", 1)[0] for name in files.names})
    state = {
        place: {key: spread_like(weight, f"{key}/{name}", files, group) for key in keys}
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


def own_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Those that this process holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def spread_like(weight: torch.Tensor, name: str, files: RowFiles, group: Group) -> torch.Tensor:
    """A tensor of the files, spread as the weight is that it belongs to."""
    if not files.shape(name):
        return files.read(name)
    own = files.read(name, rows_of(len(weight), group.rank, group.size))
    if not isinstance(weight, DTensor):
        return own
    mesh, placements = weight.device_mesh, weight.placements
    own = own.to(weight.device)
    return DTensor.from_local(own, mesh, placements, run_check=False, shape=weight.shape, stride=weight.stride())
