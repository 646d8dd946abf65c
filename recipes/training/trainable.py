"""What the program train can do of what a recipe can ask for: the rest is refused, rather than left out in silence."""

from recipes.launch import trains_shards, zero_stage
from recipes.recipe import Recipe
from recipes.schema import BadConfiguration


def missing(recipe: Recipe) -> str | None:
    """What the program train of this version cannot do of a recipe, and what to do about it; none where it can."""
    if recipe.base_model.sha256 is None:
        name = recipe.base_model.uri
        return contradiction(recipe) or (
            f"base model {name} is not pinned: set base_model to {{uri: file:///FOLDER, sha256: ...}} of its files"
        )
    return contradiction(recipe)


def contradiction(recipe: Recipe) -> str | None:
    """Of that, what no base model changes: such a job is not even taken."""
    shape = recipe.distributed
    if shape and shape.strategy == "fsdp" and recipe.method == "qlora":
        return "fsdp does not shard weights in NF4: use ddp, or method lora"
    if trains_shards(recipe) and recipe.optimizer != "adamw":  # bitsandbytes 0.50 raises at the first step
        return f"fsdp does not shard the moments of {recipe.optimizer}: use optimizer adamw"
    if shape and zero_stage(recipe) and (problem := untried_with_deepspeed(recipe)):
        return f"{shape.strategy} {problem}"
    return None


def untried_with_deepspeed(recipe: Recipe) -> str | None:
    """What keeps a recipe from DeepSpeed's strategies, which have been tried with lora or full, and adamw."""
    if recipe.method == "qlora":
        return "has not been tried beside weights in NF4: use ddp, or method lora"
    if recipe.optimizer != "adamw":
        return f"keeps the moments of adamw over restarts, and not those of {recipe.optimizer}: use optimizer adamw"
    return None


def refuse_what_is_missing(recipe: Recipe) -> None:
    """Raises BadConfiguration where `missing` names something."""
    if problem := missing(recipe):
        raise BadConfiguration(f"recipe '{recipe.name}': {problem}")
