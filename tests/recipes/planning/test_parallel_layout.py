"""Pipeline parallelism: stages, refused layouts, memory per GPU. Its training is tested in `training`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from recipes.contracts.job import BadConfiguration, Distributed
from recipes.contracts.recipe import Recipe
from recipes.planning.hardware_fit import check_fit
from recipes.planning.memory_budget import estimate_stages
from recipes.planning.parallel_layout import (
    assign_stage,
    count_micro_batches_in_flight,
    pipeline_efficiency,
    sharding_arguments,
    stage_shapes,
)
from recipes.planning.recipe_checks import resolve_shape, unsupported_reason
from recipes.planning.throughput import assume_flops
from recipes.training.model import load_model
from resources.errors import HanzoError
from resources.estimate.admission import admit_recipe

PINNED = {"base_model": {"uri": "file:///x", "sha256": "0" * 64}}
ROOT = Path(__file__).resolve().parents[3]


def cut(stages: int, name: str = "zen-72b-full", **changes: Any) -> Recipe:
    shape = {
        "distributed": {"strategy": "pipeline", "gpus_per_node": stages},
        "hardware": {"gpus": stages, "gpu_type": "nvidia-a100-80gb"},
    }
    return Recipe.named(name).changed(shape | changes)


@pytest.mark.parametrize(
    ("stages", "layers", "lengths"), [(1, 3, [3]), (2, 4, [2, 2]), (2, 3, [2, 1]), (4, 10, [2, 3, 3, 2]), (3, 3, [1, 1, 1])]
)
def test_every_layer_is_in_one_stage_and_end_stages_are_not_larger(stages: int, layers: int, lengths: list[int]) -> None:
    found = [assign_stage(rank, stages, layers, tied=False) for rank in range(stages)]
    assert [place for stage in found for place in stage.layers] == list(range(layers))
    assert [len(stage.layers) for stage in found] == lengths
    assert [stage.first for stage in found].index(True) == 0 and found[-1].last


def test_each_weight_is_in_one_stage_and_a_tied_embedding_in_both_end_stages() -> None:
    names = ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.layers.11.x", "model.norm.weight")
    for tied, of_embedding in ((False, [0]), (True, [0, 2])):
        stages = [assign_stage(rank, 3, 12, tied=tied) for rank in range(3)]
        held = {name: [rank for rank, stage in enumerate(stages) if stage.owns(name)] for name in (*names, "lm_head.weight")}
        assert list(held.values()) == [of_embedding, [0], [2], [2], [2]]
    assert assign_stage(1, 2, 12, tied=False).owns("base_model.model.model.layers.11.self_attn.q_proj.lora_A.default.weight")


@pytest.mark.parametrize(
    ("recipe", "named"),
    [
        (cut(4, objective="dpo"), "strategy pipeline does not support objective dpo: use sft, or another strategy"),
        (cut(4, objective="orpo"), "strategy pipeline does not support objective orpo"),
        (cut(4, "zen-72b-qlora"), "strategy pipeline does not support weights in NF4: use ddp, or method lora"),
        (cut(4, optimizer="adamw_8bit"), "strategy pipeline only supports optimizer adamw, not adamw_8bit"),
        (cut(4, batch_size=2, gradient_accumulation=4, rows_per_step=7), "micro-batches of equal size"),
        (
            cut(29, "zen-7b-full"),
            "divides the base model's 28 layers: use at most 28 processes",
        ),
    ],
)
def test_unsupported_pipeline_recipe_is_refused(recipe: Recipe, named: str) -> None:
    shape = resolve_shape(recipe)
    assert named in (unsupported_reason(recipe) or "")
    with pytest.raises(HanzoError, match=named):
        admit_recipe(recipe, shape)


def test_pipeline_with_tensor_parallelism_is_refused() -> None:
    with pytest.raises(ValidationError, match="tensor_parallel is not supported by pipeline: use strategy fsdp"):
        Distributed.model_validate({"strategy": "pipeline", "tensor_parallel": 2})


def test_supported_pipeline_recipes_are_admitted() -> None:
    for name in ("zen-72b-full", "zen-72b-lora", "zen-7b-lora"):
        for stages in (1, 2, 28):
            assert unsupported_reason(cut(stages, name, **PINNED)) is None


def test_model_with_fewer_layers_than_stages_is_refused_on_load(tmp_path: Path) -> None:
    shape = resolve_shape(Recipe.named("zen-7b-full")).model_copy(update={"num_hidden_layers": 3})
    (tmp_path / "config.json").write_text(shape.model_dump_json(exclude_none=True))
    with pytest.raises(BadConfiguration, match="recipe 'zen-72b-full': strategy pipeline divides the base model's 3 layers"):
        load_model(tmp_path, cut(4))


def test_samples_per_step_are_independent_of_stage_count() -> None:
    recipe = cut(8, batch_size=2, gradient_accumulation=6)
    assert (recipe.data_parallel, recipe.samples_per_step) == (1, 12)
    for processes in (1, 2, 3, 16):
        other = recipe.for_processes(processes)
        assert (other.stages, other.samples_per_step, other.batch_size) == (processes, 12, 2)
        assert sharding_arguments(other) == {"pipeline": {"stages": processes, "micro_batches": 6}}


def test_stage_holds_one_micro_batch_per_remaining_stage() -> None:
    assert [count_micro_batches_in_flight(cut(4, gradient_accumulation=16), rank) for rank in range(4)] == [4, 3, 2, 1]
    assert [count_micro_batches_in_flight(cut(4, gradient_accumulation=3), rank) for rank in range(4)] == [3, 3, 3, 3]
    recipe = cut(4, gradient_accumulation=16)
    _, second, third, _ = estimate_stages(recipe, resolve_shape(recipe))  # equal numbers of layers
    assert second.weights == third.weights and second.activations == third.activations * 3 / 2 > 0


def test_pipeline_efficiency_accounts_for_fill_and_drain() -> None:
    found = [assume_flops(cut(8, gradient_accumulation=times)) for times in (8, 56)]
    assert found[0] and found[1] and found[0].likely / found[1].likely == pytest.approx((8 / 15) / (56 / 63))
    assert pipeline_efficiency(cut(1)) == 1.0


@pytest.mark.parametrize("name", ["zen-72b-full", "zen-72b-lora"])
def test_stages_together_hold_the_model_and_each_needs_its_share_of_memory(name: str) -> None:
    shape = resolve_shape(Recipe.named(name))
    recipe = cut(16, name)
    stages = stage_shapes(recipe, shape)
    assert sum(stage.parameters for stage in stages) == shape.parameters
    needed = estimate_stages(recipe, shape)
    whole = estimate_stages(cut(1, name), shape)[0]
    assert sum(budget.weights for budget in needed) == whole.weights
    assert sum(budget.optimizer for budget in needed) == whole.optimizer
    assert check_fit(recipe, shape, 0).needed == max(budget.needed for budget in needed) < whole.needed / 8
    tied = shape.model_copy(update={"tie_word_embeddings": True})
    copies = shape.vocab_size * shape.hidden_size
    assert sum(stage.parameters for stage in stage_shapes(recipe, tied)) == tied.parameters + copies


@pytest.mark.slow
def test_dry_run_builds_the_estimated_stages(tmp_path: Path) -> None:
    document = yaml.safe_load((ROOT / "recipes" / "zen-72b-lora.yaml").read_text())
    changed = {"distributed": {"strategy": "pipeline", "num_nodes": 1, "gpus_per_node": 4}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(document | changed))
    command = [sys.executable, "-m", "recipes.dry_run", str(tmp_path / "mine.yaml")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])[0]
    stages = found["stages"]
    assert [stage["parameters"] for stage in stages] == [stage["parameters_expected"] for stage in stages]
    assert sum(stage["parameters"] for stage in stages) == found["parameters"]
    assert sum(stage["trainable"] for stage in stages) == found["trainable"] and len(stages) == 4
    assert all(40e9 < stage["memory"] < 50e9 for stage in stages)  # of 145e9 on a single GPU
