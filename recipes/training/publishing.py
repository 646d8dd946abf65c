"""Publish the trained weights or adapter, and report the run's results."""

import json
import math
import shutil
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from recipes.contracts.job import Job
from recipes.contracts.recipe import Recipe
from recipes.contracts.recovery_log import RecoveryLog
from recipes.contracts.results import TrainingFacts, Usage
from recipes.export.merge import complete_model_folder, save_model
from recipes.planning.parallel_layout import sharding_arguments
from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Artifact
from recipes.training.checkpointing.sharded_safetensors import ShardedTensors, consolidate_weights
from recipes.training.model import copy_weights, load_model
from recipes.training.parallel import zero
from recipes.training.parallel.fsdp import WEIGHTS_STEM
from recipes.training.trainer import CheckpointingTrainer


def training_facts(
    trainer: CheckpointingTrainer,
    usage: Usage,
    incidents: RecoveryLog,
    *,
    resumed_from: int | None,
    published: int,
    unsent: int,
) -> TrainingFacts:
    """`published` is the step whose weights the run left, `unsent` how many points the tracking server did not get."""
    losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    return TrainingFacts(
        train_seconds=round(usage.seconds, 3),
        gpus=usage.gpus,
        gpu_seconds=round(usage.gpu_seconds, 3),
        resumed_from=resumed_from,
        unsent_metrics=unsent,
        losses={step: loss if math.isfinite(loss) else None for step, loss in losses.items()},
        best_step=trainer.checkpoints.best_step(),
        published_step=published,
        incidents=incidents.entries,
        tokens=usage.tokens,
        peak_memory=usage.peak_memory,
        checkpoint_seconds=round(usage.checkpoints, 3),
        longest_checkpoint=round(usage.longest_checkpoint, 3),
        checkpoint_share=round(usage.checkpoint_share, 4),
    )


ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILES = ("adapter_model.safetensors", ADAPTER_CONFIG)


def publish_weights(
    folder: Path, tokenizer: PreTrainedTokenizerBase, store: Store, job: Job, base: Artifact, recipe: Recipe
) -> Artifact:
    """The adapter or weights in `folder` with the tokenizer. The digest depends on the training alone, not on place or time.

    Weights are stored in the recipe's type, in which they computed, so that what is evaluated is what will be served.
    """
    role = recipe.trained_role
    if role == "adapter":
        normalize_adapter_config(folder, base.uri)
        tokenizer.save_pretrained(folder)
    inputs = {role: artifact.digest for role, artifact in job.inputs.items()} | {"base": base.digest}
    return store.publish(folder, job.outputs[role], role, inputs=inputs)


def save_selected_weights(
    trainer: CheckpointingTrainer, chosen: tuple[int, Path] | None, base: Path, recipe: Recipe, folder: Path
) -> int:
    """Write the weights of a checkpoint, or those that training ended with where none is chosen. Returns their step."""
    if sharding_arguments(recipe):  # no process has all weights, and the others have ended
        chosen = chosen or trainer.checkpoints.latest()
        if chosen:
            trainer.checkpoints.fetch_all_weights(chosen)
        save_sharded_weights(chosen, base, recipe, folder)
        return chosen[0] if chosen else 0
    if chosen:
        trainer.restore_weights(chosen[1])
    save_whole_weights(trainer.model, base, recipe, folder)
    return chosen[0] if chosen else int(trainer.state.global_step)


def save_whole_weights(model: PreTrainedModel | PeftModel, base: Path, recipe: Recipe, folder: Path) -> None:
    """What this process holds all of."""
    if isinstance(model, PeftModel):
        model.save_pretrained(folder)
    else:
        model.to(getattr(torch, recipe.computing_dtype))
        save_model(model, base, folder)


def save_sharded_weights(checkpoint: tuple[int, Path] | None, base: Path, recipe: Recipe, folder: Path) -> None:
    """What no process holds all of, from a checkpoint: without the model, which may be larger than this machine's memory.

    It is built only where there is no checkpoint, and where its files name other tensors than it has: then transformers
    knows how they are made of each other.
    """
    shutil.rmtree(folder, ignore_errors=True)  # what a killed run left
    if checkpoint and recipe.method != "full":
        folder.mkdir()
        for name in ADAPTER_FILES:
            shutil.copyfile(checkpoint[1] / name, folder / name)
        return
    if checkpoint:
        shape = build_meta_model(base, recipe)
        stored = ShardedTensors(sorted(base.glob("*.safetensors"))).names
        if {name for name, _ in shape.named_parameters()} <= {*stored}:
            folder.mkdir()
            consolidate_weights(ShardedTensors(sorted(checkpoint[1].glob(f"{WEIGHTS_STEM}*.safetensors"))), shape, folder)
            shape.config.dtype, shape.config.architectures = recipe.computing_dtype, [type(shape).__name__]
            shape.config.save_pretrained(folder)
            complete_model_folder(base, folder)
            return
    save_whole_weights(load_whole_model(base, recipe, checkpoint), base, recipe, folder)


def build_meta_model(base: Path, recipe: Recipe) -> PreTrainedModel:
    """The model as it is published, on the meta device."""
    dtype = getattr(torch, recipe.computing_dtype)
    with zero.shard_while_loading(single_process_recipe(recipe), dtype), torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base), dtype=dtype)
    return model


def load_whole_model(base: Path, recipe: Recipe, checkpoint: tuple[int, Path] | None) -> PreTrainedModel | PeftModel:
    """The model in this process alone, on the base model, with the weights of a checkpoint, or as it began."""
    model = load_model(base, single_process_recipe(recipe))
    if recipe.method == "full":
        model.to(getattr(torch, recipe.computing_dtype))  # now: the checkpoint's float32 ones come beside it
    if checkpoint:
        copy_weights(model, f"checkpoint {checkpoint[0]}", checkpoint[1])
    return model


def single_process_recipe(recipe: Recipe) -> Recipe:
    """In one process."""
    return recipe.model_copy(update={"distributed": None})


def normalize_adapter_config(folder: Path, base_uri: str) -> None:
    """The configuration that PEFT wrote, without what differs from machine to machine."""
    (folder / "README.md").unlink(missing_ok=True)
    file = folder / ADAPTER_CONFIG
    config = json.loads(file.read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = base_uri
    config["target_modules"] = sorted(config["target_modules"])  # a set in the library: its order differs by process
    file.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
