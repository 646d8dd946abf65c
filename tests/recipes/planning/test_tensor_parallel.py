"""Tensor parallelism: refused layouts and library settings. Its training is tested in `test_two_processes`."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from recipes.contracts.job import BadConfiguration, Distributed
from recipes.contracts.recipe import Recipe
from recipes.planning.parallel_layout import fsdp_config
from recipes.planning.recipe_checks import resolve_shape, unsupported_reason
from recipes.training.model import load_model
from resources.errors import HanzoError
from resources.estimate.admission import admit_recipe

LORA = {"method": "lora", "base_dtype": "bfloat16", "lora_target_modules": ["q_proj"]}
QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 400,
}


def cut(parts: int, gpus: int = 8, name: str = "zen-72b-full", **changes: Any) -> Recipe:
    shape = {"strategy": "fsdp", "gpus_per_node": gpus, "tensor_parallel": parts}
    return Recipe.named(name).changed({"distributed": shape, "hardware": {"gpus": gpus}} | changes)


def test_shape_without_tensor_parallelism_omits_its_key() -> None:
    """Otherwise the digests of runs from before this key existed would change."""
    assert "tensor_parallel" not in Distributed(strategy="fsdp").model_dump(mode="json")
    assert Distributed(strategy="fsdp", tensor_parallel=2).model_dump(mode="json")["tensor_parallel"] == 2


@pytest.mark.parametrize(
    ("shape", "named"),
    [
        ({"strategy": "ddp", "tensor_parallel": 2}, "tensor_parallel is not supported by ddp: use strategy fsdp"),
        ({"strategy": "deepspeed_zero3", "tensor_parallel": 2}, "tensor_parallel is not supported by deepspeed_zero3"),
        ({"strategy": "fsdp", "tensor_parallel": 3}, "gpus_per_node 8 is not a multiple of tensor_parallel 3"),
        ({"strategy": "fsdp", "tensor_parallel": 0}, "greater than or equal to 1"),
    ],
)
def test_uneven_process_counts_are_refused(shape: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        Distributed.model_validate(shape)


@pytest.mark.parametrize(
    ("recipe", "named"),
    [
        (cut(2, **LORA), "tensor_parallel requires that all weights are trained: use method full"),
        (cut(8, name="zen-7b-full"), "tensor_parallel 8 does not divide num_attention_heads 28"),
        (cut(16, gpus=16), "tensor_parallel 16 does not divide num_key_value_heads 8"),
        (cut(2, architecture=QWEN3), "tensor_parallel computes wrong gradients for head norms, which qwen3 has"),
    ],
)
def test_recipe_unsupported_by_tensor_parallelism_is_refused(recipe: Recipe, named: str) -> None:
    assert named in (unsupported_reason(recipe) or "")
    with pytest.raises(HanzoError, match=named):
        admit_recipe(recipe, resolve_shape(recipe))


def test_supported_tensor_parallel_recipes_are_admitted() -> None:
    pinned = {"base_model": {"uri": "file:///x", "sha256": "0" * 64}}
    for parts in (1, 2, 4, 8):
        assert unsupported_reason(cut(parts, **pinned)) is None


def test_unsupported_model_unknown_at_submission_is_refused_on_load(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    with pytest.raises(
        BadConfiguration, match="recipe 'zen-72b-full': tensor_parallel computes wrong gradients for head norms"
    ):
        load_model(tmp_path, cut(2))


def test_fsdp_shards_over_processes_not_used_by_tensor_parallelism() -> None:
    assert fsdp_config(cut(2)) == {"fsdp_size": 4, "tp_size": 2, "fsdp_mixed_precision": True}
    # With one process FSDP gathers nothing, and autocast handles the types.
    assert fsdp_config(cut(8)) == {"fsdp_size": 1, "tp_size": 8, "fsdp_mixed_precision": False}


def test_samples_per_step_count_only_data_parallel_processes() -> None:
    recipe = cut(2, batch_size=3, gradient_accumulation=2)
    assert (recipe.processes, recipe.data_parallel, recipe.samples_per_step) == (8, 4, 3 * 2 * 4)
    assert recipe.tokens_per_step == 24 * recipe.sequence_length
    for processes, parts in ((16, 2), (6, 2), (4, 2), (3, 1), (1, 1)):
        other = recipe.for_processes(processes)
        assert (other.processes, other.tensor_parallel, other.samples_per_step) == (processes, parts, 24)
