"""What a model is trained towards: one class each, found by the name that a recipe gives.

A class that is installed under the entry point group `hanzo_ml.objectives`, or `hanzo_ml.objectives.pairs` where it learns
from pairs, is an objective as good as these.
"""

from importlib.metadata import EntryPoints, entry_points

from recipes.contracts.job import BadConfiguration
from recipes.contracts.recipe import Recipe
from recipes.contracts.recipe_references import OBJECTIVES_GROUP, PAIR_OBJECTIVES_GROUP
from recipes.training.objectives.dpo_orpo import Dpo, Orpo
from recipes.training.objectives.objective import Objective
from recipes.training.objectives.sft import Sft

BUILT_IN_OBJECTIVES: dict[str, type[Objective]] = {"sft": Sft, "dpo": Dpo, "orpo": Orpo}


def make_objective(recipe: Recipe) -> Objective:
    """The objective that a recipe names. Raises BadConfiguration where it is not installed, or cannot be made."""
    if recipe.objective in BUILT_IN_OBJECTIVES:
        return BUILT_IN_OBJECTIVES[recipe.objective](recipe)
    found = EntryPoints((*entry_points(group=OBJECTIVES_GROUP), *entry_points(group=PAIR_OBJECTIVES_GROUP)))
    if recipe.objective not in found.names:
        known = ", ".join([*BUILT_IN_OBJECTIVES, *sorted(found.names)])
        raise BadConfiguration(f"recipe '{recipe.name}': objective {recipe.objective} is not installed here: use {known}")
    entry = found[recipe.objective]
    try:
        made = entry.load()(recipe)
    except Exception as problem:  # whatever its module or its class comes to
        why = f"{type(problem).__name__}: {problem}"
        raise BadConfiguration(f"objective {recipe.objective}: {entry.value} cannot be made: {why}") from problem
    if not isinstance(made, Objective):
        raise BadConfiguration(f"objective {recipe.objective}: {entry.value} is no Objective: derive it from that class")
    return made
