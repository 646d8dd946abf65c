"""Which objectives there are, built in or installed, and which of them learn from pairs; no torch in here."""

from functools import cache
from importlib.metadata import entry_points

OBJECTIVES_GROUP = "hanzo_ml.objectives"
"""Entry point group of the objectives that an operator has installed (`recipes.training.objectives`)."""
PAIR_OBJECTIVES_GROUP = "hanzo_ml.objectives.pairs"
"""Of those that learn from pairs, both of whose answers go through the model: memory and tokens are reckoned where no torch
is, which to import the class itself would need. So what installs it says so.
"""
PREFERENCE_OBJECTIVES = ("dpo", "orpo")
BUILT_IN_OBJECTIVES = ("sft", *PREFERENCE_OBJECTIVES)


@cache  # to look takes 14 ms, and a sweep has a thousand recipes
def learns_from_pairs(objective: str) -> bool:
    """Whether an objective, built in or installed, learns from pairs."""
    if objective in BUILT_IN_OBJECTIVES:
        return objective in PREFERENCE_OBJECTIVES
    return objective in entry_points(group=PAIR_OBJECTIVES_GROUP).names


def list_installed_objectives() -> list[str]:
    """Those of others."""
    return sorted(entry_points(group=OBJECTIVES_GROUP).names | entry_points(group=PAIR_OBJECTIVES_GROUP).names)


def require_known_objective(name: str) -> str:
    """The same name. Raises ValueError, naming those there are, where it is of none."""
    if name in BUILT_IN_OBJECTIVES:  # to look for others takes 14 ms, of each of the thousand recipes of a sweep
        return name
    installed = list_installed_objectives()
    if name not in installed:
        raise ValueError(f"unknown objective: use {', '.join([*BUILT_IN_OBJECTIVES, *installed])}")
    return name
