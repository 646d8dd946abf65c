"""Refuse jobs whose recipe cannot be trained or does not fit in memory."""

import json
import os
from collections.abc import Iterator
from contextlib import suppress

from recipes.contracts.job import BadConfiguration
from recipes.contracts.recipe import Recipe
from recipes.contracts.recipe_references import BUILT_IN_OBJECTIVES, PREFERENCE_OBJECTIVES
from recipes.planning.architecture import Architecture
from recipes.planning.hardware_fit import HardwareFit, check_fit, find_alternative
from recipes.planning.recipe_checks import (
    ASSUMED_SHAPES,
    find_contradiction,
    known_shape,
    read_folder_shape,
    sequence_too_long_reason,
)
from recipes.records.record_layouts import Layout, detect_column_layout
from recipes.storage.artifact_store import Store
from resources.errors import invalid
from resources.metadata.datasets import DatasetVersion

# The shape of a recipe's base model: from its own configuration if that is available, else from the known shapes.


def base_model_shape(recipe: Recipe, store: Store) -> Architecture | None:
    """Return the shape.

    None if it is not stated anywhere, or its family is not supported. A folder is read without a check:
    `resources.jobs.submission.allow_base_model` checks who may name one.
    """
    uri = recipe.base_model.artifact_uri
    if uri is None:
        return known_shape(recipe)
    try:
        return Architecture.from_config(json.loads(store.get_bytes(f"{uri}/config.json")))
    except FileNotFoundError:
        return local_or_known_shape(recipe)
    except (BadConfiguration, ValueError):
        return None


def local_or_known_shape(recipe: Recipe) -> Architecture | None:
    """Return the shape of a base model that no job has used yet.

    So the memory of its first run is checked too.
    """
    try:
        return read_folder_shape(recipe) or known_shape(recipe)
    except BadConfiguration:
        return None


def is_shape_assumed(recipe: Recipe) -> bool:
    """Return whether the shape is only assumed (see `recipes.planning.recipe_checks`)."""
    return recipe.architecture is None and recipe.base_model.sha256 is None and recipe.base_model.uri in ASSUMED_SHAPES


# Decides whether a job may be launched. A recipe that cannot be trained, or does not fit in memory, is refused with a
# suggestion.


def machine_memory_bytes() -> int:
    """Return this machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def estimate_memory(recipe: Recipe, shape: Architecture | None) -> HardwareFit | None:
    """Return how a recipe fits.

    None if the base model's shape, or a module with an adapter, is unknown.
    """
    if shape is None:
        return None
    try:
        return check_fit(recipe, shape, machine_memory_bytes())
    except BadConfiguration:
        return None


def admit_recipe(recipe: Recipe, shape: Architecture | None) -> HardwareFit | None:
    """Return how a recipe fits, and refuse one that cannot.

    If too little is known, nothing is refused.

    Raises:
        HanzoError: this version does not support the recipe, or it does not fit; then the message has both sizes and the
            nearest recipe that fits.
    """
    if problem := find_contradiction(recipe, shape) or sequence_too_long_reason(
        recipe, shape.max_position_embeddings if shape else None
    ):
        raise invalid(f"recipe '{recipe.name}': {problem}")
    found = estimate_memory(recipe, shape)
    if found is not None and shape is not None and not found.fits:
        raise invalid(f"recipe '{recipe.name}' {found.message}: {suggest_fitting_recipe(recipe, shape)}")
    return found


def admit_dataset(recipe: Recipe, version: DatasetVersion) -> None:
    """Refuse a dataset from whose columns the objective cannot learn.

    Of custom objectives, only those that declare pairs are checked.

    Raises:
        HanzoError: it has pairs and the objective uses none, the reverse, or no layout that can be trained on.
    """
    if recipe.objective not in BUILT_IN_OBJECTIVES and not recipe.has_pairs:
        return
    found, wants_pairs = detect_column_layout(version.schema), recipe.has_pairs
    refusal = f"objective {recipe.objective} cannot learn from dataset {version.reference}"
    if found is None:
        named = ", ".join(layout for layout in Layout if (layout is Layout.PREFERENCE) is wants_pairs)
        raise invalid(f"{refusal}, whose records have none of {named}: use a dataset that has")
    if wants_pairs and found is not Layout.PREFERENCE:
        named = f"whose records are {found} and not {Layout.PREFERENCE}"
        raise invalid(f"{refusal}, {named}: set objective sft, or use a dataset of pairs")
    if found is Layout.PREFERENCE and not wants_pairs:
        others = " or ".join(PREFERENCE_OBJECTIVES)
        raise invalid(f"{refusal}, whose records are pairs ({found}): set objective {others}, or use another dataset")


def suggest_fitting_recipe(recipe: Recipe, shape: Architecture) -> str:
    found = find_alternative(recipe, shape, list(readable_recipes()), machine_memory_bytes())
    return f"use {found.message}" if found else "no recipe of this base model fits: lower batch_size or sequence_length"


def readable_recipes() -> Iterator[Recipe]:
    """Yield all recipes except those with a broken file, which `hanzo-ml recipe list` reports."""
    for name in Recipe.names():
        with suppress(BadConfiguration):
            yield Recipe.named(name)
