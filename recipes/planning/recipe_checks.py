"""What the program train can do of what a recipe can ask for: the rest is refused, rather than left out in silence."""

import json
from pathlib import Path

from recipes import tensor_parallel
from recipes.contracts.job import BadConfiguration
from recipes.contracts.recipe import Recipe
from recipes.launch import trains_shards, zero_stage
from recipes.planning import parallel_layout
from recipes.planning.architecture import Architecture
from recipes.planning.known_architectures import known_shape


def missing(recipe: Recipe) -> str | None:
    """What the program train of this version cannot do of a recipe, and what to do about it; none where it can."""
    return contradiction(recipe, known_shape(recipe)) or unpinned(recipe)


def unpinned(recipe: Recipe) -> str | None:
    """That the files of its base model are not at hand, where they are not."""
    return None if recipe.base_model.sha256 else recipe.base_model.problem


def contradiction(recipe: Recipe, shape: Architecture | None) -> str | None:
    """Of that, what needs no files of the base model, whose shape is none where it is not known: such a job is not taken."""
    distributed, gpus = recipe.distributed, recipe.hardware.gpus
    if distributed is None and gpus > 1:  # the others would be held, and paid for, and do nothing
        alone = f"hardware.gpus is {gpus}, and without distributed one process trains on one of them"
        return f"{alone}: add distributed: {{strategy: ddp, gpus_per_node: {gpus}}}, or take 1"
    if distributed and distributed.strategy == "fsdp" and recipe.method == "qlora":
        return "fsdp does not shard weights in NF4: use ddp, or method lora"
    if trains_shards(recipe) and recipe.optimizer != "adamw":  # bitsandbytes 0.50 raises at the first step
        return f"fsdp does not shard the moments of {recipe.optimizer}: use optimizer adamw"
    if distributed and zero_stage(recipe) and (problem := untried_with_deepspeed(recipe)):
        return f"{distributed.strategy} {problem}"
    strange = strange_target(recipe, shape) if shape else None
    return tensor_parallel.untried(recipe, shape) or parallel_layout.untried(recipe, shape) or strange


def strange_target(recipe: Recipe, shape: Architecture) -> str | None:
    """What is wrong with a module that the adapter is put on: one that PEFT does not find beside others, it leaves out."""
    for target in recipe.lora_target_modules:
        if not any(is_named(module, target) for module in shape.modules):
            known = ", ".join(shape.projections)
            return f"lora_target_modules: there is no '{target}' in this model: use some of {known}"
    return None


def is_named(module: str, target: str) -> bool:
    """Whether a target of an adapter means a module: by its whole name, or the end of it, as PEFT has it."""
    return module == target or module.endswith(f".{target}")


def untried_with_deepspeed(recipe: Recipe) -> str | None:
    """What keeps a recipe from DeepSpeed's strategies, which have been tried with lora or full, and adamw."""
    if recipe.method == "qlora":
        return "has not been tried beside weights in NF4: use ddp, or method lora"
    if recipe.optimizer != "adamw":
        return f"keeps the moments of adamw over restarts, and not those of {recipe.optimizer}: use optimizer adamw"
    return None


def too_long(recipe: Recipe, positions: int | None) -> str | None:
    """What is wrong with rows of more tokens than the base model has positions: no text that long was ever in its training.

    A model with scaled positions (RoPE scaling) states as many as it has with them. None where nothing is known.
    """
    if positions is None or recipe.sequence_length <= positions:
        return None
    return (
        f"sequence_length is {recipe.sequence_length}, and base model {recipe.base_model.uri} has {positions} positions: "
        f"lower it to {positions} or less, and raise batch_size in its stead"
    )


def refuse_too_long(recipe: Recipe, model: Path) -> None:
    """`too_long` of the base model in that folder. Raises BadConfiguration."""
    config = json.loads((model / "config.json").read_text())
    positions = config.get("text_config", config).get("max_position_embeddings")
    if problem := too_long(recipe, positions):
        raise BadConfiguration(f"recipe '{recipe.name}': {problem}")


def refuse_what_is_missing(recipe: Recipe) -> None:
    """Raises BadConfiguration where `missing` names something."""
    if problem := missing(recipe):
        raise BadConfiguration(f"recipe '{recipe.name}': {problem}")
