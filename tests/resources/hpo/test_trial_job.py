"""Job of a trial, built from the sweep and its recipe."""

from typing import Any

import pytest

from recipes.contracts.recipe import Recipe
from resources.errors import HanzoError
from resources.hpo.trial_job import build_trial_job
from tests.resources.hpo.sweep_files import sweep

PBT = {"strategy": "pbt", "pbt": {"population": 2, "generations": 3}}
BASE = sweep().base_config


@pytest.mark.parametrize(
    ("base", "params", "seed"),
    [
        ({}, {}, Recipe.named("smollm2-135m-lora").seed),
        ({"seed": 7}, {}, 7),
        ({"parameters": {"seed": 7}}, {}, 7),
        ({}, {"seed": 9}, 9),
        ({"recipe": None, "model": "ellarin-assistant"}, {}, 42),
    ],
)
def test_seed_of_a_generation_is_the_first_seed_plus_its_number(
    base: dict[str, Any], params: dict[str, Any], seed: int
) -> None:
    config = sweep(base_config={**BASE, **base}, **PBT)
    first = build_trial_job(config, params)["parameters"]
    assert first.get("seed") == ({**base, **base.get("parameters", {}), **params}.get("seed")), "digests stay as they were"
    later = [build_trial_job(config, params, generation)["parameters"] for generation in (1, 2)]
    assert [each["seed"] for each in later] == [seed + 1, seed + 2]
    assert all({**each, "seed": None} == {**first, "seed": None} for each in later)


@pytest.mark.parametrize(("every", "expected"), [(10, 10), (14, 14), (20, 14), (None, None)])
def test_every_generation_is_evaluated_at_its_end_at_the_latest(every: int | None, expected: int | None) -> None:
    """Three generations of 40 steps have 14 steps each."""
    base = {key: value for key, value in {**BASE, "eval_steps": every}.items() if value is not None}
    parameters = build_trial_job(sweep(base_config=base, **PBT), {}, 1)["parameters"]
    assert (parameters["max_steps"], parameters.get("eval_steps")) == (14, expected)


@pytest.mark.parametrize(
    ("given", "schedule"),
    [
        (None, {"max_duration": "48h", "preemptible": False, "priority": "low"}),
        ({"priority": "high"}, {"max_duration": "48h", "preemptible": False, "priority": "high"}),
        (
            {"checkpoint_interval": "5m", "preemptible": True},
            {"max_duration": "48h", "checkpoint_interval": "5m", "preemptible": True, "priority": "low"},
        ),
    ],
)
def test_trial_has_the_limits_of_its_sweep_and_low_priority_by_default(given: Any, schedule: dict[str, Any]) -> None:
    job = build_trial_job(sweep(base_config={**BASE, "schedule": given}), {})
    assert job["schedule"] == schedule and "schedule" not in job["parameters"]


@pytest.mark.parametrize("given", ["tonight", [], {"priority": "urgent"}, {"deadline": "2h"}])
def test_invalid_schedule_is_refused(given: Any) -> None:
    with pytest.raises(HanzoError, match=r"base_config\.schedule"):
        build_trial_job(sweep(base_config={**BASE, "schedule": given}), {})


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        ({"recipe": None, "model": "zen-7b"}, ("sandbox", "zen-7b-lora", None)),
        ({"recipe": None, "model": "ellarin-assistant", "method": "full"}, ("ellarin-assistant", None, "full")),
        ({"method": "full"}, ("sandbox", "smollm2-135m-lora", "full")),
    ],
)
def test_method_selects_the_recipe_by_name_or_becomes_a_parameter(
    base: dict[str, Any], expected: tuple[str, str | None, str | None]
) -> None:
    job = build_trial_job(sweep(base_config={**BASE, **base}), {})
    assert (job["model"], job.get("recipe"), job["parameters"].get("method")) == expected


def test_seed_after_the_largest_wraps_to_zero() -> None:
    """Regression: recipes accept no larger seed, so all trials of the second generation failed."""
    config = sweep(base_config={**BASE, "seed": 2**32 - 1}, **PBT)
    assert [build_trial_job(config, {}, generation)["parameters"]["seed"] for generation in range(3)] == [2**32 - 1, 0, 1]


def test_pod_settings_of_a_sweep_apply_to_every_trial() -> None:
    pod = {"image_pull_secrets": ["registry"]}
    job = build_trial_job(sweep(base_config={**BASE, "pod": pod}), {})
    assert job["pod"].items() >= {"image_pull_secrets": ["registry"]}.items() and "pod" not in job["parameters"]
    assert "pod" not in build_trial_job(sweep(base_config=BASE), {})
    with pytest.raises(HanzoError, match=r"base_config\.pod: .*privileged"):
        build_trial_job(sweep(base_config={**BASE, "pod": {"privileged": True}}), {})
