"""Check that a recipe can be trained, before anything is loaded."""

import json
from pathlib import Path

from recipes.contracts.job import BadConfiguration
from recipes.contracts.recipe import Recipe
from recipes.planning import parallel_layout
from recipes.planning import parallel_layout as tensor_parallel
from recipes.planning.architecture import Architecture
from recipes.planning.known_architectures import known_shape
from recipes.planning.parallel_layout import trains_shards, zero_stage


def unsupported_reason(recipe: Recipe) -> str | None:
    """What the program train of this version cannot do of a recipe, and what to do about it; none where it can."""
    return find_contradiction(recipe, known_shape(recipe)) or unpinned_model_reason(recipe)


def unpinned_model_reason(recipe: Recipe) -> str | None:
    """That the files of its base model are not at hand, where they are not."""
    return None if recipe.base_model.sha256 else recipe.base_model.problem


def find_contradiction(recipe: Recipe, shape: Architecture | None) -> str | None:
    """Of that, what needs no files of the base model, whose shape is none where it is not known: such a job is not taken."""
    distributed, gpus = recipe.distributed, recipe.hardware.gpus
    if distributed is None and gpus > 1:  # the others would be held, and paid for, and do nothing
        problem_text = f"hardware.gpus is {gpus}, and without distributed one process trains on one of them"
        return f"{problem_text}: add distributed: {{strategy: ddp, gpus_per_node: {gpus}}}, or take 1"
    if distributed and distributed.strategy == "fsdp" and recipe.method == "qlora":
        return "fsdp does not shard weights in NF4: use ddp, or method lora"
    if trains_shards(recipe) and recipe.optimizer != "adamw":  # bitsandbytes 0.50 raises at the first step
        return f"fsdp does not shard the moments of {recipe.optimizer}: use optimizer adamw"
    if distributed and zero_stage(recipe) and (problem := deepspeed_limitation(recipe)):
        return f"{distributed.strategy} {problem}"
    unknown_target = find_unknown_target(recipe, shape) if shape else None
    return (
        tensor_parallel.find_tensor_parallel_problem(recipe, shape)
        or parallel_layout.find_pipeline_problem(recipe, shape)
        or unknown_target
    )


def find_unknown_target(recipe: Recipe, shape: Architecture) -> str | None:
    """What is wrong with a module that the adapter is put on: one that PEFT does not find beside others, it leaves out."""
    for target in recipe.lora_target_modules:
        if not any(matches_target(module, target) for module in shape.modules):
            known = ", ".join(shape.projections)
            return f"lora_target_modules: there is no '{target}' in this model: use some of {known}"
    return None


def matches_target(module: str, target: str) -> bool:
    """Whether a target of an adapter means a module: by its whole name, or the end of it, as PEFT has it."""
    return module == target or module.endswith(f".{target}")


def deepspeed_limitation(recipe: Recipe) -> str | None:
    """What keeps a recipe from DeepSpeed's strategies, which have been tried with lora or full, and adamw."""
    if recipe.method == "qlora":
        return "has not been tried beside weights in NF4: use ddp, or method lora"
    if recipe.optimizer != "adamw":
        return f"keeps the moments of adamw over restarts, and not those of {recipe.optimizer}: use optimizer adamw"
    return None


def sequence_too_long_reason(recipe: Recipe, positions: int | None) -> str | None:
    """What is wrong with rows of more tokens than the base model has positions: no text that long was ever in its training.

    A model with scaled positions (RoPE scaling) states as many as it has with them. None where nothing is known.
    """
    if positions is None or recipe.sequence_length <= positions:
        return None
    return (
        f"sequence_length is {recipe.sequence_length}, and base model {recipe.base_model.uri} has {positions} positions: "
        f"lower it to {positions} or less, and raise batch_size in its stead"
    )


def check_sequence_length(recipe: Recipe, model: Path) -> None:
    """`sequence_too_long_reason` of the base model in that folder. Raises BadConfiguration."""
    config = json.loads((model / "config.json").read_text())
    positions = config.get("text_config", config).get("max_position_embeddings")
    if problem := sequence_too_long_reason(recipe, positions):
        raise BadConfiguration(f"recipe '{recipe.name}': {problem}")


def check_supported(recipe: Recipe) -> None:
    """Raises BadConfiguration where `unsupported_reason` names something."""
    if problem := unsupported_reason(recipe):
        raise BadConfiguration(f"recipe '{recipe.name}': {problem}")
