"""Refusal message of a job that does not fit."""

import shutil
from pathlib import Path

import pytest

import recipes.contracts.recipe
from recipes.contracts.recipe import RECIPES_FOLDER, Recipe
from recipes.planning.recipe_checks import resolve_shape
from resources.errors import HanzoError
from resources.estimate.admission import admit_recipe

ONE_80GB = {"hardware": {"gpus": 1, "gpu_type": "nvidia-a100-80gb"}, "distributed": None}


def test_job_that_does_not_fit_is_refused_with_a_fitting_recipe_despite_a_broken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the message only named a misspelled key of another recipe."""
    recipe = Recipe.named("zen-72b-lora").changed(ONE_80GB)
    for name in ("zen-72b-lora", "zen-72b-qlora"):
        shutil.copy(RECIPES_FOLDER / f"{name}.yaml", tmp_path)
    (tmp_path / "mine.yaml").write_text(
        (RECIPES_FOLDER / "zen-7b-lora.yaml").read_text().replace("batch_size", "batch_sise")
    )
    monkeypatch.setattr(recipes.contracts.recipe, "RECIPES_FOLDER", tmp_path)
    with pytest.raises(HanzoError, match=r"recipe 'zen-72b-lora' needs .* use .*zen-72b-qlora"):
        admit_recipe(recipe, resolve_shape(recipe))


def test_job_that_fits_no_recipe_is_refused_with_the_keys_to_lower() -> None:
    """No recipe of that base model has this objective."""
    recipe = Recipe.named("zen-72b-lora").changed({**ONE_80GB, "objective": "dpo", "batch_size": 1})
    with pytest.raises(HanzoError, match=r"no recipe of this base model fits: lower batch_size or sequence_length$"):
        admit_recipe(recipe, resolve_shape(recipe))
