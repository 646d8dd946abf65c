"""The shape of a recipe's base model: from its own configuration where the object store has it, else as it is known."""

import json

from recipes.architecture import Architecture
from recipes.known_architectures import ASSUMED, known_shape
from recipes.recipe import Recipe
from recipes.schema import BadConfiguration
from recipes.store import Store


def shape_of_base(recipe: Recipe, store: Store) -> Architecture | None:
    """The shape, or none where nobody has stated it, or it is of a family that is not known here."""
    uri = recipe.base_model.artifact_uri
    if uri is None:
        return known_shape(recipe)
    try:
        return Architecture.from_config(json.loads(store.get_bytes(f"{uri}/config.json")))
    except FileNotFoundError:
        return known_shape(recipe)
    except (BadConfiguration, ValueError):
        return None


def is_assumed(recipe: Recipe) -> bool:
    """Whether the shape is only assumed (see `recipes.known_architectures`)."""
    return recipe.architecture is None and recipe.base_model.sha256 is None and recipe.base_model.uri in ASSUMED
