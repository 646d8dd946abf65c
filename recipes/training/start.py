"""Where a fresh run's weights come from when they are another run's: its input `start` (row K3: members of a population)."""

from pathlib import Path

import torch
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from transformers import PreTrainedModel

from recipes.contracts.job import BadConfiguration
from recipes.contracts.recipe import Recipe
from recipes.launch import saves_by_name, zero_stage
from recipes.runner import say
from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Artifact
from recipes.training.parallel import zero
from recipes.training.parallel.fsdp import load_weights
from recipes.training.parallel.pipeline_stage import load_adapter
from recipes.training.parallel.process_group import Group
from recipes.training.row_files import RowFiles


def start_from(
    start: Artifact, model: PreTrainedModel | PeftModel, recipe: Recipe, group: Group, store: Store, cache: Path
) -> None:
    """Give a model the weights of `start`. Raises BadConfiguration: they do not fit it."""
    with group.one_fetches():
        weights = store.fetch(start, cache)
    if zero_stage(recipe) == 3 and recipe.method == "full":
        zero.load_weights(model, weights, leads=group.leads)
    elif saves_by_name(recipe) and not isinstance(model, PeftModel):
        load_weights(model, weights)
    elif recipe.stages > 1:
        load_adapter(model, weights)
    else:
        copy_weights(model, f"input 'start' ({start.uri})", weights)
    say(f"starting from the weights of {start.uri}")


def copy_weights(model: PreTrainedModel | PeftModel, name: str, folder: Path) -> None:
    """Give a model the trained weights that lie in `folder`: those of a run, or of a checkpoint. `name` is for people.

    Optimizer and schedule begin anew: their numbers belong to other hyperparameters.

    Raises:
        BadConfiguration: there are none, or they are of another shape.
    """
    is_adapter = isinstance(model, PeftModel)
    files = sorted(folder.glob("adapter_model.safetensors" if is_adapter else "model*.safetensors"))
    if not files:
        raise BadConfiguration(f"{name} has no {'adapter' if is_adapter else 'weights'}: start from another")
    weights = RowFiles(files)
    own: dict[str, torch.Tensor] = get_peft_model_state_dict(model) if is_adapter else model.state_dict()
    given = {own[name].data_ptr() for name in weights.names if name in own}
    differing = [name for name in weights.names if name not in own or not fits(weights.shape(name), own[name])]
    differing += [name for name in own if weights.shape(name) is None and own[name].data_ptr() not in given]  # else tied
    if differing:
        raise BadConfiguration(f"{name} does not fit the recipe: {min(differing)} is another shape")
    if is_adapter:
        set_peft_model_state_dict(model, {name: weights.read(name) for name in weights.names})
        return
    for name in weights.names:  # one by one: all of them beside the model are twice the memory
        own[name].copy_(weights.read(name).view_as(own[name]))


def fits(shape: torch.Size | None, weight: torch.Tensor) -> bool:
    """DeepSpeed's checkpoints have each weight as one row of numbers."""
    return shape in (weight.shape, (weight.numel(),))
