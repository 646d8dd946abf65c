"""Sampled metric histories: evenly spread like NTILE, including the first and last points."""

import math

import pytest

from resources.metadata.database import Database
from resources.metadata.field_rules import MetricPoint, metric_point
from resources.metadata.tracking.metrics import StepRange
from resources.metadata.tracking.tracking import Tracking


@pytest.fixture
def tracking(database: Database) -> Tracking:
    tracking = Tracking(database)
    tracking.experiments.ensure_default()
    for run_id in ("a", "b"):
        tracking.runs.create(0, run_id=run_id)
        tracking.run_data.log_batch(run_id, [metric_point("m", float(step), step, 1) for step in range(23)])
    tracking.run_data.log_batch("a", [metric_point("one step", value, 0, 1) for value in (3.0, math.nan, 1.0, 2.0)])
    return tracking


def sampled(tracking: Tracking, key: str, limit: int, steps: StepRange | None = None) -> list[MetricPoint]:
    return [found.point for found in tracking.metric_sampling.sample(["a"], key, limit, steps)]


def first_of_each_part(count: int, parts: int) -> list[int]:
    """Return the first point of each part, computed from the definition of NTILE."""
    size, longer = divmod(count, parts)
    lengths = [size + 1] * longer + [size] * (parts - longer)
    return [sum(lengths[:part]) for part in range(parts) if lengths[part]]


def test_sample_has_the_first_point_of_each_part_and_the_last_point(tracking: Tracking) -> None:
    for limit in (1, 2, 3, 5, 7, 11, 22, 23, 24, 2500):
        expected = first_of_each_part(23, limit)
        expected[-1] = 22
        assert [point.step for point in sampled(tracking, "m", limit)] == expected, limit


def test_sample_of_an_interval_includes_both_ends(tracking: Tracking) -> None:
    assert [point.step for point in sampled(tracking, "m", 3, StepRange(4, 12))] == [4, 7, 12]
    assert sampled(tracking, "m", 3, StepRange(100, 200)) == []


def test_points_of_a_single_step_are_sampled(tracking: Tracking) -> None:
    assert sampled(tracking, "one step", 2) == [
        metric_point("one step", math.nan, 0, 1),
        metric_point("one step", 3.0, 0, 1),
    ]


def test_samples_keep_the_requested_run_order_and_skip_unknown_runs(tracking: Tracking) -> None:
    found = tracking.metric_sampling.sample(["b", "nobody", "a"], "m", 1)
    assert [(point.run_id, point.point.step) for point in found] == [("b", 22), ("a", 22)]
    assert tracking.metric_sampling.sample(["a"], "nothing", 5) == []


def test_first_points_of_several_runs_share_one_limit(tracking: Tracking) -> None:
    found = tracking.metric_sampling.first_points(["b", "a"], "m", 25)
    assert [(point.run_id, point.point.step) for point in found] == [("a", step) for step in range(23)] + [
        ("b", 0),
        ("b", 1),
    ]
