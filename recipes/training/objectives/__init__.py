"""Training objectives: one class each, selected by the name in a recipe.

Classes registered under the entry point group `hanzo_ml.objectives`, or `hanzo_ml.objectives.pairs` if they learn from
pairs, are equal to the built-in ones.
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
    """Create the objective that a recipe names.

    Raises:
        BadConfiguration: it is not installed, or its creation failed.
    """
    if recipe.objective in BUILT_IN_OBJECTIVES:
        return BUILT_IN_OBJECTIVES[recipe.objective](recipe)
    found = EntryPoints((*entry_points(group=OBJECTIVES_GROUP), *entry_points(group=PAIR_OBJECTIVES_GROUP)))
    if recipe.objective not in found.names:
        known = ", ".join([*BUILT_IN_OBJECTIVES, *sorted(found.names)])
        raise BadConfiguration(f"recipe '{recipe.name}': objective {recipe.objective} is not installed here: use {known}")
    entry = found[recipe.objective]
    try:
        made = entry.load()(recipe)
    except Exception as problem:  # third-party code may raise anything
        why = f"{type(problem).__name__}: {problem}"
        raise BadConfiguration(f"objective {recipe.objective}: {entry.value} cannot be made: {why}") from problem
    if not isinstance(made, Objective):
        raise BadConfiguration(f"objective {recipe.objective}: {entry.value} is no Objective: derive it from that class")
    return made
