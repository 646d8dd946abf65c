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
    """Collect the run's results.

    Args:
        resumed_from: step of the checkpoint that this attempt started from.
        published: step of the published weights.
        unsent: number of metric points that the tracking server did not acknowledge.
    """
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
    """Publish the adapter or weights in `folder` with the tokenizer.

    The digest depends on the training alone, not on machine or time. Weights are stored in the recipe's dtype, in which
    they computed, so that evaluation and serving use the same values.
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
    """Write the weights of checkpoint `chosen`, or the final ones if it is None.

    Returns:
        The step that the weights belong to.
    """
    if sharding_arguments(recipe):  # no process holds all weights, and the other processes have ended
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
    """Write a model that this process holds entirely."""
    if isinstance(model, PeftModel):
        model.save_pretrained(folder)
    else:
        model.to(getattr(torch, recipe.computing_dtype))
        save_model(model, base, folder)


def save_sharded_weights(checkpoint: tuple[int, Path] | None, base: Path, recipe: Recipe, folder: Path) -> None:
    """Write the weights of a sharded run from its checkpoint, without building the model.

    The model may exceed this machine's memory.

    The model is built only if there is no checkpoint, or if the base model's files name other tensors than the model has:
    then only transformers knows how to convert between them.
    """
    shutil.rmtree(folder, ignore_errors=True)  # left by a killed run
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
    """Build the model as published on the meta device, without memory for weights."""
    dtype = getattr(torch, recipe.computing_dtype)
    with zero.shard_while_loading(single_process_recipe(recipe), dtype), torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base), dtype=dtype)
    return model


def load_whole_model(base: Path, recipe: Recipe, checkpoint: tuple[int, Path] | None) -> PreTrainedModel | PeftModel:
    """Load the model in one process, with a checkpoint's weights or its initial ones."""
    model = load_model(base, single_process_recipe(recipe))
    if recipe.method == "full":
        # first, because the checkpoint's float32 weights need memory as well
        model.to(getattr(torch, recipe.computing_dtype))
    if checkpoint:
        copy_weights(model, f"checkpoint {checkpoint[0]}", checkpoint[1])
    return model


def single_process_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe without distribution."""
    return recipe.model_copy(update={"distributed": None})


def normalize_adapter_config(folder: Path, base_uri: str) -> None:
    """Remove machine-dependent values from the adapter configuration that PEFT wrote."""
    (folder / "README.md").unlink(missing_ok=True)
    file = folder / ADAPTER_CONFIG
    config = json.loads(file.read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = base_uri
    config["target_modules"] = sorted(config["target_modules"])  # PEFT writes a set, whose order differs between processes
    file.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
