"""Whether a job may be launched: one whose recipe cannot be trained, or cannot fit its memory, is refused, with what would
do (row L8).
"""

import os
from collections.abc import Iterator
from contextlib import suppress

from recipes.contracts.job import BadConfiguration
from recipes.contracts.objective_names import BUILT_IN_OBJECTIVES, PREFERENCES
from recipes.contracts.recipe import Recipe
from recipes.fit import Fit, fit, nearest
from recipes.planning.architecture import Architecture
from recipes.planning.recipe_checks import contradiction, too_long
from recipes.records.layouts import Layout, layout_of_columns
from resources.errors import invalid
from resources.metadata.datasets import DatasetVersion


def memory_of_machine() -> int:
    """In bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_of(recipe: Recipe, shape: Architecture | None) -> Fit | None:
    """How a recipe fits; none where the base model's shape, or a module that the adapter is put on, is not known here."""
    if shape is None:
        return None
    try:
        return fit(recipe, shape, memory_of_machine())
    except BadConfiguration:
        return None


def admit(recipe: Recipe, shape: Architecture | None) -> Fit | None:
    """How a recipe fits; one that cannot is refused. Nothing is refused of which too little is known.

    Raises:
        HanzoError: it asks for what this version cannot do, or cannot fit; then the message has both sizes and the nearest
            recipe that fits.
    """
    if problem := contradiction(recipe, shape) or too_long(recipe, shape.max_position_embeddings if shape else None):
        raise invalid(f"recipe '{recipe.name}': {problem}")
    found = memory_of(recipe, shape)
    if found is not None and shape is not None and not found.fits:
        raise invalid(f"recipe '{recipe.name}' {found.words}: {advice(recipe, shape)}")
    return found


def admit_dataset(recipe: Recipe, version: DatasetVersion) -> None:
    """Refuse a dataset whose records, as its columns say, the objective cannot learn from. Of the objectives of others only
    those are known that learn from pairs.

    Raises:
        HanzoError: it has pairs and the objective takes none, it has none and the objective takes them, or nothing that a
            model could be trained on.
    """
    if recipe.objective not in BUILT_IN_OBJECTIVES and not recipe.has_pairs:
        return
    found, wants_pairs = layout_of_columns(version.schema), recipe.has_pairs
    what = f"objective {recipe.objective} cannot learn from dataset {version.reference}"
    if found is None:
        named = ", ".join(layout for layout in Layout if (layout is Layout.PREFERENCE) is wants_pairs)
        raise invalid(f"{what}, whose records have none of {named}: name a dataset that has")
    if wants_pairs and found is not Layout.PREFERENCE:
        named = f"whose records are {found} and not {Layout.PREFERENCE}"
        raise invalid(f"{what}, {named}: set objective sft, or name a dataset of pairs")
    if found is Layout.PREFERENCE and not wants_pairs:
        others = " or ".join(PREFERENCES)
        raise invalid(f"{what}, whose records are pairs ({found}): set objective {others}, or name another dataset")


def advice(recipe: Recipe, shape: Architecture) -> str:
    found = nearest(recipe, shape, list(readable()), memory_of_machine())
    return f"use {found.words}" if found else "no recipe of this base model fits: lower batch_size or sequence_length"


def readable() -> Iterator[Recipe]:
    """All recipes but those whose file is broken, of which `hanzo-ml recipe list` tells."""
    for name in Recipe.names():
        with suppress(BadConfiguration):
            yield Recipe.named(name)
