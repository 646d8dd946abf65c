"""What a training run leaves: an adapter or all weights, as an artifact."""

import json
from pathlib import Path

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from recipes.merge import save
from recipes.recipe import Recipe
from recipes.schema import Artifact, Job
from recipes.store import Store
from recipes.training.model import load_for_training
from recipes.training.start import copy_weights


def publish_trained(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    store: Store,
    job: Job,
    base: Artifact,
    recipe: Recipe,
    work: Path,
) -> Artifact:
    """The final adapter or weights with the tokenizer. The digest depends on the training alone, not on place or time.

    Weights are stored in the recipe's type, in which they computed, so that what is evaluated is what will be served.
    """
    role = "adapter" if isinstance(model, PeftModel) else "weights"
    folder = work / role
    if isinstance(model, PeftModel):
        save_adapter(model, tokenizer, base.uri, folder)
    else:
        model.to(getattr(torch, recipe.computing_dtype))
        save(model, store.fetch(base, Path(job.cache_dir)), folder)
    inputs = {role: artifact.digest for role, artifact in job.inputs.items()} | {"base": base.digest}
    return store.publish(folder, job.outputs[role], role, inputs=inputs)


def whole(folder: Path, recipe: Recipe, checkpoint: tuple[int, Path] | None) -> PreTrainedModel | PeftModel:
    """The model in this process alone, on the base model in `folder`, with the weights of a checkpoint, or as it began."""
    model = load_for_training(folder, recipe.model_copy(update={"distributed": None}))
    if recipe.method == "full":
        model.to(getattr(torch, recipe.computing_dtype))  # now: the checkpoint's float32 ones come beside it
    if checkpoint:
        copy_weights(model, f"checkpoint {checkpoint[0]}", checkpoint[1])
    return model


def save_adapter(model: PeftModel, tokenizer: PreTrainedTokenizerBase, base_uri: str, folder: Path) -> None:
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    config_file = folder / "adapter_config.json"
    config = json.loads(config_file.read_text())
    config["base_model_name_or_path"] = base_uri
    config["target_modules"] = sorted(config["target_modules"])  # a set in the library: its order differs by process
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True))
    tokenizer.save_pretrained(folder)
