"""Estimated hours and dollars, from measured past runs or else from assumptions."""

from dataclasses import replace

import pytest

from recipes.contracts.recipe import Recipe
from recipes.planning.hardware_fit import check_fit
from recipes.planning.recipe_checks import resolve_shape
from recipes.planning.throughput import estimate_flops_per_token
from resources.estimate.job_estimate import DEFAULT_OVERHEAD_SECONDS, DatasetTokens, Estimate, estimate_job
from resources.estimate.past_runs import PastRun, job_overhead_seconds, seconds_per_step, tokens_per_step
from resources.metadata.field_rules import MetricPoint
from resources.metadata.jobs import JobRecord

PRICES = {"nvidia-a100-40gb": 2.0, "nvidia-a100-80gb": 3.0}
RECIPE = Recipe.named("zen-7b-lora")
SHAPE = resolve_shape(RECIPE)
DAYS_MS = 3 * 24 * 3600 * 1000


def run(tokens_per_second: float, around: float | None = None) -> PastRun:
    return PastRun("r", tokens_per_second, tokens_per_second * estimate_flops_per_token(RECIPE, SHAPE), around)


def estimated(*past: PastRun, recipe: Recipe = RECIPE, dataset: DatasetTokens | None = None) -> Estimate:
    shape = resolve_shape(recipe)
    return estimate_job(recipe, shape, memory=check_fit(recipe, shape, 0), dataset=dataset, past=past, prices=PRICES)


def test_tokens_cover_all_steps_and_epochs_follow_from_the_dataset() -> None:
    found = estimated(dataset=DatasetTokens(10_000_000, 9_000, "counted"))
    assert found.tokens == 10_000 * 4 * 4 * 2048
    assert found.epochs == pytest.approx(32.768)


def test_pairs_are_estimated_unpacked_at_their_average_length() -> None:
    """Regression: each answer counted as sequence_length tokens, a tenfold estimate for short pairs."""
    pairs = RECIPE.changed({"objective": "dpo"})
    most = 10_000 * 16 * 2 * 2048
    nothing, short = estimated(recipe=pairs), estimated(recipe=pairs, dataset=DatasetTokens(1_200_000, 4_000, "counted"))
    assert nothing.tokens == most and any(note.startswith("tokens: at most, as if each") for note in nothing.notes)
    assert short.tokens == 10_000 * 16 * 300 and short.epochs == 10_000 * 16 / 4_000
    assert any("pairs are not packed, and have 300 on average" in note for note in short.notes)
    assert nothing.hours is not None and short.hours is not None
    work = 3600 * (nothing.hours.likely - DEFAULT_OVERHEAD_SECONDS.likely / 3600)
    assert 3600 * (short.hours.likely - DEFAULT_OVERHEAD_SECONDS.likely / 3600) == pytest.approx(work * short.tokens / most)
    assert short.hours.high == nothing.hours.high, "padding may make each as long as that"
    measured = estimated(run(2000.0, 60.0), recipe=pairs, dataset=DatasetTokens(1_200_000, 4_000, "counted"))
    assert measured.hours is not None
    assert measured.hours.likely * 3600 == pytest.approx(short.tokens / 2000 + 60)
    assert measured.hours.high * 3600 == pytest.approx(short.tokens / 1400 + 60), "it was as slow as its padding made it"
    long = estimated(recipe=pairs, dataset=DatasetTokens(40_000_000, 4_000, "counted"))
    assert long.tokens == most, "answers are cut at sequence_length"


def test_tokens_per_step_of_pairs_are_those_that_the_past_run_logged() -> None:
    pairs = RECIPE.changed({"objective": "orpo"})
    used = [MetricPoint("system/total_steps", 50.0, 0, 1), MetricPoint("system/total_tokens_processed", 12_500.0, 0, 1)]
    assert tokens_per_step(pairs, used) == 250
    assert tokens_per_step(pairs, used[:1]) is None and tokens_per_step(pairs, []) is None, "it runs still"
    assert tokens_per_step(RECIPE, used) == RECIPE.tokens_per_step, "rows are packed"


@pytest.mark.requirement("L9")
def test_tokens_per_parameter_count_only_trained_parameters() -> None:
    """Trained are all 7.6 billion parameters, or the adapter's 161 million."""
    full = Recipe.named("zen-7b-full")
    found = estimated(recipe=full)
    assert found.trained == resolve_shape(full).parameters
    assert found.tokens_per_parameter == pytest.approx(found.tokens / 7.6e9, rel=0.01)
    adapter = estimated()
    assert adapter.trained == sum(t.total for t in SHAPE.adapter(RECIPE.lora_rank, RECIPE.lora_target_modules))
    assert adapter.tokens_per_parameter == adapter.tokens / adapter.trained
    odd = RECIPE.changed({"lora_target_modules": ["lm_head"]})
    unknown = estimate_job(odd, SHAPE, memory=None, dataset=None, past=[], prices=PRICES)
    assert unknown.trained is None and unknown.tokens_per_parameter is None


def test_estimate_without_a_past_run_is_a_wide_assumed_range() -> None:
    found = estimated()
    assert found.hours is not None and found.source.startswith("assumed")
    assert found.hours.high > 3 * found.hours.low


def test_assumed_source_names_the_throughput_used_in_the_estimate() -> None:
    """Regression: for compiled blocks the text named another share of the peak than was used."""
    compiled, sharded = Recipe.named("zen-7b-lora"), Recipe.named("zen-72b-lora")
    assert estimated(recipe=compiled).source.endswith("; 15% to 60% of the GPU's peak")
    assert estimated(recipe=sharded).source.endswith("; 12% to 50% of the GPU's peak")
    here = Recipe.named("smollm2-135m-lora")
    assert estimated(recipe=here).source.endswith("; 5 to 150 billion operations a second of a core")


def test_one_past_run_gives_its_own_speed_with_a_margin() -> None:
    found = estimated(run(2000.0, around=60.0))
    assert found.hours is not None and found.source.startswith("measured: 1 past run ")
    assert found.hours.likely * 3600 == pytest.approx(found.tokens / 2000 + 60)
    assert found.hours.low < found.hours.likely < found.hours.high < 1.5 * found.hours.likely


def test_several_past_runs_give_the_range_that_they_had() -> None:
    found = estimated(run(1000.0, 30.0), run(2000.0, 60.0), run(4000.0, 90.0))
    assert found.hours is not None and "3 past runs" in found.source
    assert found.hours.likely * 3600 == pytest.approx(found.tokens / 2000 + 60)
    assert found.hours.low * 3600 == pytest.approx(found.tokens / 4400 + 30)
    assert found.hours.high * 3600 == pytest.approx(found.tokens / 900 + 90)


def test_past_runs_of_another_sequence_length_are_scaled_by_operations() -> None:
    """A longer sequence costs more per token because of attention."""
    longer = RECIPE.changed({"sequence_length": 8192, "batch_size": 1})
    found = estimated(run(2000.0, 0.0), recipe=longer)
    assert found.hours is not None
    assert found.hours.likely * 3600 > found.tokens / 2000 * 1.05


def test_unfinished_past_run_gives_its_speed_and_no_overhead() -> None:
    found = estimated(run(2000.0))
    assert found.hours is not None
    assert found.hours.likely * 3600 == pytest.approx(found.tokens / 2000 + DEFAULT_OVERHEAD_SECONDS.likely)


@pytest.mark.requirement("Z26")
def test_dollars_are_priced_for_all_gpus_by_the_price_book() -> None:
    """The recipe's own $4.17 is not used, but shown separately."""
    found = estimated(recipe=Recipe.named("zen-72b-full"))
    assert found.hours is not None and found.dollars is not None and found.gpus == 32
    assert found.dollars.likely == pytest.approx(found.hours.likely * 32 * 3.0)
    assert found.dollars.low == pytest.approx(found.hours.low * 96)
    assert found.dollars.high == pytest.approx(found.hours.high * 96)
    assert found.recipe.estimated_cost == "$22,400"


def test_a_gpu_without_a_price_has_no_cost_and_the_note_says_where_to_put_it() -> None:
    found = estimated(recipe=RECIPE.changed({"hardware": {"gpus": 1, "gpu_type": "nvidia-h100-80gb"}}))
    assert found.hours is not None and found.dollars is None
    assert any("prices.gpu_hour" in note for note in found.notes)


def test_job_without_gpus_costs_nothing_and_needs_no_price() -> None:
    found = estimated(recipe=Recipe.named("smollm2-135m-lora"))
    assert found.hours is not None and found.dollars is not None and found.dollars.high == 0
    assert not any(note.startswith("dollars") for note in found.notes)


def test_empty_dataset_gives_no_pair_length() -> None:
    found = estimated(recipe=RECIPE.changed({"objective": "dpo"}), dataset=DatasetTokens(0, 0, "counted"))
    assert found.epochs is None and found.tokens == 10_000 * 16 * 2 * 2048


def test_model_of_unknown_shape_has_hours_only_after_a_first_run() -> None:
    unknown = RECIPE.changed({"base_model": "someone/else"})
    nothing = estimate_job(unknown, None, memory=None, dataset=None, past=[], prices=PRICES)
    assert nothing.hours is None and nothing.dollars is None
    assert any(note.startswith("memory") for note in nothing.notes) and any(
        note.startswith("hours") for note in nothing.notes
    )
    after = estimate_job(unknown, None, memory=None, dataset=None, past=[PastRun("r", 500.0, 500.0, 0.0)], prices=PRICES)
    assert after.hours is not None and after.hours.likely * 3600 == pytest.approx(after.tokens / 500)


def test_pause_between_two_steps_is_excluded_from_step_time() -> None:
    """The run was killed after step 10 and resumed an hour later."""
    times = {step: step * 1000 for step in range(1, 11)} | {step: 3_600_000 + step * 1000 for step in range(11, 21)}
    assert seconds_per_step(times) == pytest.approx(1.0)


def test_steps_without_a_logged_loss_keep_the_step_time() -> None:
    assert seconds_per_step({step: step * 1000 for step in (1, 2, 3, 4, 8, 20)}) == pytest.approx(1.0)


def test_evaluation_between_two_steps_is_included_in_step_time() -> None:
    times = {step: step * 1000 + (4000 if step > 5 else 0) for step in range(1, 11)}
    assert seconds_per_step(times) == pytest.approx((8 * 1 + 5) / 9)


@pytest.mark.parametrize(
    "times", [{}, {1: 0}, {1: 0, 2: 1000}, {step: step * 1000 for step in range(5)}, dict.fromkeys(range(100), 5)]
)
def test_too_few_steps_give_no_step_time(times: dict[int, int]) -> None:
    assert seconds_per_step(times) is None


@pytest.mark.parametrize(
    ("first", "begun_at"),
    [(10_000, 0), (DAYS_MS + 10_000, DAYS_MS), (10_000, 15_000)],
    ids=["once", "again before its first step", "again between two steps"],
)
def test_overhead_excludes_the_time_that_a_job_stood_still(first: int, begun_at: int) -> None:
    """One failed before its first step and was resumed three days later.

    `started_at` keeps the time of the first start.
    """
    times = {step: first + step * 1000 for step in range(21)}
    job = JobRecord("j", "j", "training", "completed", {}, "u", "default", 0, 0, first + 40_000, "", {}, None)
    assert job_overhead_seconds(job, times, 20, begun_at) == pytest.approx(30)
    assert job_overhead_seconds(replace(job, ended_at=first), times, 20, begun_at) == 0, "the clock of who trains was ahead"


@pytest.mark.parametrize(
    ("status", "started_at", "ended_at", "last"),
    [
        ("failed", 0, 40_000, 20),
        ("running", 0, None, 20),
        ("completed", None, 40_000, 20),
        ("completed", 0, 40_000, 19),  # its last loss has not arrived
    ],
)
def test_incomplete_job_has_no_known_overhead(status: str, started_at: int | None, ended_at: int | None, last: int) -> None:
    times = {step: 10_000 + step * 1000 for step in range(last + 1)}
    job = JobRecord("j", "j", "training", status, {}, "u", "default", 0, started_at, ended_at, "", {}, None)
    assert job_overhead_seconds(job, times, 20, 0) is None
