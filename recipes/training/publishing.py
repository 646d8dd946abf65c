"""What a training run leaves: an adapter or all weights, as an artifact."""

import json
import shutil
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from recipes.contracts.job import Job
from recipes.contracts.recipe import Recipe
from recipes.export.merge import complete, save
from recipes.launch import sharding
from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Artifact
from recipes.training.checkpointing.sharded_safetensors import write_whole
from recipes.training.model import load_for_training
from recipes.training.parallel import zero
from recipes.training.parallel.fsdp import WEIGHTS
from recipes.training.row_files import RowFiles
from recipes.training.start import copy_weights
from recipes.training.trainer import CheckpointingTrainer

ADAPTER_CONFIG = "adapter_config.json"
OF_ADAPTER = ("adapter_model.safetensors", ADAPTER_CONFIG)


def publish_trained(
    folder: Path, tokenizer: PreTrainedTokenizerBase, store: Store, job: Job, base: Artifact, recipe: Recipe
) -> Artifact:
    """The adapter or weights in `folder` with the tokenizer. The digest depends on the training alone, not on place or time.

    Weights are stored in the recipe's type, in which they computed, so that what is evaluated is what will be served.
    """
    role = recipe.trained_role
    if role == "adapter":
        settle_adapter(folder, base.uri)
        tokenizer.save_pretrained(folder)
    inputs = {role: artifact.digest for role, artifact in job.inputs.items()} | {"base": base.digest}
    return store.publish(folder, job.outputs[role], role, inputs=inputs)


def save_chosen(
    trainer: CheckpointingTrainer, chosen: tuple[int, Path] | None, base: Path, recipe: Recipe, folder: Path
) -> int:
    """Write the weights of a checkpoint, or those that training ended with where none is chosen. Returns their step."""
    if sharding(recipe):  # no process has all weights, and the others have ended
        chosen = chosen or trainer.checkpoints.latest()
        if chosen:
            trainer.checkpoints.complete(chosen)
        save_spread(chosen, base, recipe, folder)
        return chosen[0] if chosen else 0
    if chosen:
        trainer.take_weights(chosen[1])
    save_trained(trainer.model, base, recipe, folder)
    return chosen[0] if chosen else int(trainer.state.global_step)


def save_trained(model: PreTrainedModel | PeftModel, base: Path, recipe: Recipe, folder: Path) -> None:
    """What this process holds all of."""
    if isinstance(model, PeftModel):
        model.save_pretrained(folder)
    else:
        model.to(getattr(torch, recipe.computing_dtype))
        save(model, base, folder)


def save_spread(checkpoint: tuple[int, Path] | None, base: Path, recipe: Recipe, folder: Path) -> None:
    """What no process holds all of, from a checkpoint: without the model, which may be larger than this machine's memory.

    It is built only where there is no checkpoint, and where its files name other tensors than it has: then transformers
    knows how they are made of each other.
    """
    shutil.rmtree(folder, ignore_errors=True)  # what a killed run left
    if checkpoint and recipe.method != "full":
        folder.mkdir()
        for name in OF_ADAPTER:
            shutil.copyfile(checkpoint[1] / name, folder / name)
        return
    if checkpoint:
        shape = without_bytes(base, recipe)
        stored = RowFiles(sorted(base.glob("*.safetensors"))).names
        if {name for name, _ in shape.named_parameters()} <= {*stored}:
            folder.mkdir()
            write_whole(RowFiles(sorted(checkpoint[1].glob(f"{WEIGHTS}*.safetensors"))), shape, folder)
            shape.config.dtype, shape.config.architectures = recipe.computing_dtype, [type(shape).__name__]
            shape.config.save_pretrained(folder)
            complete(base, folder)
            return
    save_trained(whole(base, recipe, checkpoint), base, recipe, folder)


def without_bytes(base: Path, recipe: Recipe) -> PreTrainedModel:
    """The model as it is published, on the meta device."""
    dtype = getattr(torch, recipe.computing_dtype)
    with zero.spread_as_they_are_read(alone(recipe), dtype), torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base), dtype=dtype)
    return model


def whole(base: Path, recipe: Recipe, checkpoint: tuple[int, Path] | None) -> PreTrainedModel | PeftModel:
    """The model in this process alone, on the base model, with the weights of a checkpoint, or as it began."""
    model = load_for_training(base, alone(recipe))
    if recipe.method == "full":
        model.to(getattr(torch, recipe.computing_dtype))  # now: the checkpoint's float32 ones come beside it
    if checkpoint:
        copy_weights(model, f"checkpoint {checkpoint[0]}", checkpoint[1])
    return model


def alone(recipe: Recipe) -> Recipe:
    """In one process."""
    return recipe.model_copy(update={"distributed": None})


def settle_adapter(folder: Path, base_uri: str) -> None:
    """The configuration that PEFT wrote, without what differs from machine to machine."""
    (folder / "README.md").unlink(missing_ok=True)
    file = folder / ADAPTER_CONFIG
    config = json.loads(file.read_text())
    config["base_model_name_or_path"] = base_uri
    config["target_modules"] = sorted(config["target_modules"])  # a set in the library: its order differs by process
    file.write_text(json.dumps(config, indent=2, sort_keys=True))
