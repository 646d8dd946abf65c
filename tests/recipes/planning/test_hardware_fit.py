"""Hardware fit of a recipe: whether it fits, what would fit instead, expected speed."""

from dataclasses import replace
from typing import Any

import pytest

from recipes.contracts.recipe import Recipe
from recipes.planning.architecture import Architecture
from recipes.planning.gpus import GIB, GPU_SPECS, parse_gpu_requirement
from recipes.planning.hardware_fit import check_fit, find_alternative, suggest_smaller_batches
from recipes.planning.recipe_checks import resolve_shape
from recipes.planning.throughput import assume_flops, estimate_flops_per_token

ALL = [Recipe.named(name) for name in Recipe.names()]
HOST = 8 * GIB
ONE_80GB = {"hardware": {"gpus": 1, "gpu_type": "nvidia-a100-80gb"}, "distributed": None}
ONE_40GB = {"hardware": {"gpus": 1, "gpu_type": "nvidia-a100-40gb"}, "distributed": None}


@pytest.mark.parametrize("recipe", ALL, ids=lambda recipe: recipe.name)
def test_every_recipe_fits_its_own_hardware(recipe: Recipe) -> None:
    found = check_fit(recipe, resolve_shape(recipe), host_memory=0)
    assert found.fits and found.available is not None and found.needed <= found.available


@pytest.mark.parametrize(
    ("name", "changes", "instead", "parameters"),
    [
        ("zen-72b-lora", ONE_80GB, "zen-72b-qlora", {}),
        ("zen-7b-full", ONE_40GB, "zen-7b-lora", {}),
        ("zen-7b-lora", {"batch_size": 16}, "zen-7b-lora", {"batch_size": 8, "gradient_accumulation": 8}),
        ("zen-7b-lora", {"batch_size": 15}, "zen-7b-lora", {"batch_size": 5, "gradient_accumulation": 12}),
        ("zen-72b-qlora", ONE_40GB, "zen-72b-qlora", {}),
    ],
)
def test_nearest_fitting_alternative_is_suggested(
    name: str, changes: dict[str, Any], instead: str, parameters: dict[str, int]
) -> None:
    recipe = Recipe.named(name).changed(changes)
    shape = resolve_shape(recipe)
    assert not check_fit(recipe, shape, HOST).fits
    found = find_alternative(recipe, shape, ALL, HOST)
    assert found is not None
    assert (found.recipe.name, found.parameters) == (instead, parameters)
    assert check_fit(found.recipe, shape, HOST).fits
    assert instead in found.message or parameters


def test_memory_allowance_must_fit_on_a_gpu_but_not_on_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """All free memory of a GPU is known; a host refuses nothing that could run."""
    recipe = Recipe.named("zen-7b-lora")
    shape = resolve_shape(recipe)
    budget = check_fit(recipe, shape, HOST).budget
    assert budget.certain < budget.needed - GIB
    for memory, fits in ((budget.needed, True), (budget.needed - 1, False)):
        monkeypatch.setitem(GPU_SPECS, "nvidia-a100-40gb", replace(GPU_SPECS["nvidia-a100-40gb"], memory=memory))
        assert check_fit(recipe, shape, HOST).fits is fits
    here = recipe.changed({"hardware": {"gpus": 0}})
    certain = int(check_fit(here, shape, HOST).budget.certain)
    assert check_fit(here, shape, certain + 1).fits and not check_fit(here, shape, certain - 1).fits


@pytest.mark.parametrize(("memory", "fits"), [("4Gi", False), ("64Gi", True), (None, True)])
def test_paged_optimizer_states_need_host_memory(memory: str | None, fits: bool) -> None:
    """Regression: 57 GiB of paged optimizer states were estimated as zero."""
    hardware = {"gpus": 1, "gpu_type": "nvidia-h200-141gb", "memory": memory}
    recipe = Recipe.named("zen-7b-full").changed({"optimizer": "paged_adamw", "distributed": None, "hardware": hardware})
    found = check_fit(recipe, resolve_shape(recipe), host_memory=0)
    assert found.fits is fits and found.available is not None and found.needed < found.available
    assert found.paged == 2 * 4 * resolve_shape(recipe).parameters + 4 * sum(t.copies for t in resolve_shape(recipe).tensors)
    said = "56.7 GiB there or in the 4.0 GiB that hardware.memory has for each"
    assert (said in found.message) is (memory == "4Gi")


def test_suggested_smaller_batch_keeps_the_effective_batch() -> None:
    recipe = Recipe.named("zen-7b-lora").changed({"batch_size": 16})
    found = find_alternative(recipe, resolve_shape(recipe), ALL, HOST)
    assert found is not None and found.recipe.tokens_per_step == recipe.tokens_per_step


def test_no_alternative_is_suggested_when_none_fits() -> None:
    recipe = Recipe.named("smollm2-135m-lora").changed({"batch_size": 8, "hardware": {"memory": "100Mi"}})
    shape = resolve_shape(recipe)
    assert not check_fit(recipe, shape, host_memory=GIB // 8).fits
    assert find_alternative(recipe, shape, [], host_memory=GIB // 8) is None


def test_unknown_gpu_type_is_not_refused() -> None:
    recipe = Recipe.named("zen-7b-full").changed({"hardware": {"gpus": 1, "gpu_type": "tpu-v5"}, "distributed": None})
    found = check_fit(recipe, resolve_shape(recipe), HOST)
    assert found.fits and found.available is None and "unknown" in found.message


def test_cpu_fit_uses_the_larger_of_requested_and_available_memory() -> None:
    """Local processes are not limited to a pod's memory, so what ran before keeps running."""
    recipe = Recipe.named("smollm2-135m-lora").changed({"batch_size": 16})
    shape = resolve_shape(recipe)
    assert check_fit(recipe, shape, host_memory=16 * GIB).fits
    assert not check_fit(recipe, shape, host_memory=0).fits
    assert check_fit(recipe.changed({"hardware": {"memory": "64Gi"}}), shape, host_memory=0).fits


def test_processes_of_one_host_share_its_memory() -> None:
    recipe = Recipe.named("smollm2-135m-lora")
    two = recipe.changed({"distributed": {"strategy": "ddp", "num_nodes": 1, "gpus_per_node": 2, "backend": "gloo"}})
    shape = resolve_shape(recipe)
    assert check_fit(two, shape, HOST).needed > 1.9 * check_fit(recipe, shape, HOST).needed


def test_gpu_requirement_of_every_recipe_is_a_known_gpu() -> None:
    for recipe in ALL:
        if recipe.gpu_requirement:
            assert parse_gpu_requirement(recipe.gpu_requirement).gpu_type in GPU_SPECS


def test_flops_per_weight_are_six_for_full_fine_tuning_and_four_for_lora() -> None:
    """PaLM's rule; attention and adapters add a few percent at this length."""
    full = Recipe.named("zen-7b-full").changed({"gradient_checkpointing": False})
    lora = Recipe.named("zen-7b-lora").changed({"gradient_checkpointing": False})
    shape = resolve_shape(full)
    weights = shape.parameters - shape.vocab_size * shape.hidden_size  # an embedding is looked up, not multiplied
    assert estimate_flops_per_token(full, shape) == pytest.approx(6 * weights, rel=0.05)
    assert estimate_flops_per_token(lora, shape) == pytest.approx(4 * weights, rel=0.10)


def test_checkpointing_costs_a_third_more() -> None:
    full = Recipe.named("zen-7b-full")
    shape = resolve_shape(full)
    again = estimate_flops_per_token(full, shape) / estimate_flops_per_token(
        full.changed({"gradient_checkpointing": False}), shape
    )
    assert 1.2 < again < 1.34


def test_mfu_excludes_recomputed_flops() -> None:
    full = Recipe.named("zen-7b-full")
    shape = resolve_shape(full)
    once = estimate_flops_per_token(full, shape, recomputed=False)
    assert once == estimate_flops_per_token(full.changed({"gradient_checkpointing": False}), shape)


def test_assumed_speed_is_a_range_that_grows_with_gpus() -> None:
    one = Recipe.named("zen-7b-lora")
    eight = one.changed({"hardware": {"gpus": 8, "gpu_type": "nvidia-a100-40gb"}, "distributed": {"strategy": "ddp"}})
    speed, speed_of_8 = assume_flops(one), assume_flops(eight)
    assert speed is not None and speed_of_8 is not None
    assert speed.low < speed.likely < speed.high < GPU_SPECS["nvidia-a100-40gb"].flops
    assert speed.high / speed.low > 3
    assert 7 < speed_of_8.likely / speed.likely < 8
    unknown = one.changed({"hardware": {"gpus": 1, "gpu_type": "tpu-v5"}})
    assert assume_flops(unknown) is None
    sharded = assume_flops(eight.changed({"distributed": {"strategy": "fsdp"}}))
    assert sharded is not None and sharded.likely < speed_of_8.likely, "blocks of shards are not compiled"


def test_a_published_run_is_within_the_assumed_range() -> None:
    """Llama-2-7B with LoRA on one A100.

    2,392 tokens per second in plain Hugging Face, 4,007 in Unsloth (published by LLaMA-Factory).
    """
    recipe = Recipe.named("zen-7b-lora").changed({"gradient_checkpointing": False, "lora_rank": 8})
    llama = Architecture(
        model_type="llama",
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        intermediate_size=11008,
        vocab_size=32000,
    )
    speed = assume_flops(recipe)
    assert speed is not None
    each = estimate_flops_per_token(recipe, llama)
    assert speed.low / each < 2392 < 4007 < speed.high / each


def test_allowance_is_shown_but_not_required_on_a_host() -> None:
    recipe = Recipe.named("smollm2-135m-lora").changed({"hardware": {}})
    shape = resolve_shape(recipe)
    found = check_fit(recipe, shape, HOST)
    tight = int(found.budget.certain) + 1
    assert check_fit(recipe, shape, tight).fits
    assert not check_fit(recipe, shape, tight - 2).fits
    assert replace(found.budget, allowance=0.0).needed == found.budget.certain


def test_smaller_micro_batches_of_an_uneven_step_leave_no_round_empty() -> None:
    """Halving the micro-batches and doubling the rounds would leave a round empty."""
    shape = {"strategy": "ddp", "gpus_per_node": 24}
    keys = {"batch_size": 4, "gradient_accumulation": 2, "distributed": shape, "rows_per_step": 100}
    found = [one.recipe for one in suggest_smaller_batches(Recipe.named("smollm2-135m-lora").changed(keys))]
    assert [(one.batch_size, one.gradient_accumulation, one.samples_per_step) for one in found] == [(2, 3, 100), (1, 5, 100)]
    assert all(Recipe.model_validate(one.model_dump(mode="json")) == one for one in found)
