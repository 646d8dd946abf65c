"""What the program train can do of what a recipe can ask for: the rest is refused, rather than left out in silence."""

from recipes.recipe import Recipe
from recipes.schema import BadConfiguration


def missing(recipe: Recipe) -> str | None:
    """What the program train of this version cannot do of a recipe, and what to do about it; none where it can."""
    shape = recipe.distributed
    if shape and (recipe.processes > 1 or shape.strategy != "ddp"):
        return f"{shape.strategy} in {recipe.processes} processes is not in this version yet: leave out distributed"
    if recipe.base_model.sha256 is None:
        name = recipe.base_model.uri
        return f"base model {name} is not pinned: set base_model to {{uri: file:///FOLDER, sha256: ...}} of its files"
    return None


def refuse_what_is_missing(recipe: Recipe) -> None:
    """Raises BadConfiguration where `missing` names something."""
    if problem := missing(recipe):
        raise BadConfiguration(f"recipe '{recipe.name}': {problem}")
