"""Comparison of two runs: bitwise equality, with NaN equal to NaN."""

import math

import pytest

from resources.replay.comparison import FileDifference, StepDifference, compare_runs

WEIGHTS = {"adapter/adapter_model.safetensors": "a" * 64}


def test_equal_runs_have_no_difference() -> None:
    found = compare_runs({1: 2.5, 2: 1.25}, {2: 1.25, 1: 2.5}, WEIGHTS, dict(WEIGHTS))
    assert found.equal
    assert (found.steps, found.first_difference, found.weights) == (2, None, ())


@pytest.mark.requirement("Y12")
def test_the_first_step_that_differs_is_named() -> None:
    now = {1: 2.5, 2: math.nextafter(1.25, 2), 10: 7.0}
    found = compare_runs({1: 2.5, 2: 1.25, 10: 0.5}, now, WEIGHTS, WEIGHTS)
    assert not found.equal
    assert found.first_difference == StepDifference(step=2, then=1.25, now=math.nextafter(1.25, 2))


def test_other_weights_differ_though_the_losses_agree() -> None:
    found = compare_runs({1: 2.5}, {1: 2.5}, WEIGHTS, {"adapter/adapter_model.safetensors": "b" * 64})
    assert not found.equal
    assert found.first_difference is None
    assert found.weights == (FileDifference(path="adapter/adapter_model.safetensors", then="a" * 64, now="b" * 64),)


def test_weights_that_one_run_does_not_have_differ() -> None:
    assert compare_runs({}, {}, WEIGHTS, {}).weights[0].now is None
    assert compare_runs({}, {}, {}, WEIGHTS).weights[0].then is None


def test_nan_equals_only_nan() -> None:
    assert compare_runs({1: math.nan, 2: None}, {1: None, 2: math.nan}, {}, {}).equal
    found = compare_runs({1: 2.5, 2: None}, {1: 2.5, 2: 0.5}, {}, {})
    assert found.first_difference == StepDifference(step=2, then="not finite", now=0.5)


def test_runs_of_different_length_differ_at_the_first_missing_step() -> None:
    longer = {1: 2.5, 2: 1.25, 3: 1.0}
    assert compare_runs({1: 2.5, 2: 1.25}, longer, {}, {}).first_difference == StepDifference(
        step=3, then="missing", now=1.0
    )
    assert compare_runs(longer, {1: 2.5}, {}, {}).first_difference == StepDifference(step=2, then=1.25, now="missing")
