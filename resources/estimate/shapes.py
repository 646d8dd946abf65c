"""The shape of a recipe's base model: from its own configuration where it is at hand, else as it is known."""

import json

from recipes.contracts.job import BadConfiguration
from recipes.contracts.recipe import Recipe
from recipes.planning.architecture import Architecture
from recipes.planning.known_architectures import ASSUMED, known_shape, shape_in_folder
from recipes.storage.artifact_store import Store


def shape_of_base(recipe: Recipe, store: Store) -> Architecture | None:
    """The shape, or none where nobody has stated it, or it is of a family that is not known here.

    A folder is looked into: whoever names one may (`api.routes.v1.job_submission.allow_base_model`).
    """
    uri = recipe.base_model.artifact_uri
    if uri is None:
        return known_shape(recipe)
    try:
        return Architecture.from_config(json.loads(store.get_bytes(f"{uri}/config.json")))
    except FileNotFoundError:
        return beside_the_store(recipe)
    except (BadConfiguration, ValueError):
        return None


def beside_the_store(recipe: Recipe) -> Architecture | None:
    """Of a base model that no job has used yet: its first run is compared with its memory too."""
    try:
        return shape_in_folder(recipe) or known_shape(recipe)
    except BadConfiguration:
        return None


def is_assumed(recipe: Recipe) -> bool:
    """Whether the shape is only assumed (see `recipes.planning.known_architectures`)."""
    return recipe.architecture is None and recipe.base_model.sha256 is None and recipe.base_model.uri in ASSUMED
