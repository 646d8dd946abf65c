"""Decisions of the metric buffer, without a thread and without a network."""

import json
import math

import pytest

from hanzo_ml.client.points import Point, ResumeFilter, drop_known_points, newest_repeated_step, parse_newest_steps
from hanzo_ml.client.repeated_steps import UNKNOWN_TIME, RepeatedSteps
from hanzo_ml.client.retry import MAX_ATTEMPTS, MAX_RETRY_SECONDS, is_refusal, retry_delay


@pytest.mark.parametrize("value", [0.1, -0.0, math.inf, -math.inf, 1e308])
def test_a_point_survives_a_checkpoint(value: float) -> None:
    point = Point("train/loss", value, 3, 99)
    assert Point.from_json(json.loads(json.dumps(point.to_json(), allow_nan=False))) == point


def test_nan_survives_a_checkpoint() -> None:
    data = json.loads(json.dumps(Point("a", math.nan, 0, 0).to_json(), allow_nan=False))
    assert math.isnan(Point.from_json(data).value)


def test_resume_filter_drops_only_recomputed_steps_already_logged() -> None:
    resumption = ResumeFilter(step=10, newest={"loss": 12, "summary": 0})
    logged_again = [Point("loss", 0.0, step, 1) for step in range(9, 15)]
    assert [point.step for point in drop_known_points(logged_again, resumption)] == [9, 10, 13, 14]
    assert drop_known_points([Point("summary", 0.0, 0, 1), Point("new", 0.0, 11, 1)], resumption) == [
        Point("summary", 0.0, 0, 1),
        Point("new", 0.0, 11, 1),
    ]


@pytest.mark.parametrize(("again", "left"), [({}, [12, 13, 15]), ({"loss": 12}, [13, 15]), ({"loss": 13}, [15])])
def test_repeated_steps_are_logged_again_exactly_once(again: dict[str, int], left: list[int]) -> None:
    resumption = ResumeFilter(step=10, newest={"loss": 14}, repeated=(RepeatedSteps(range(12, 14), 99),), again=again)
    logged_again = [Point("loss", 0.0, step, 1) for step in range(11, 16)]
    assert [point.step for point in drop_known_points(logged_again, resumption)] == left


def test_newest_repeated_step_counts_only_values_after_the_repeat_time() -> None:
    """Rolled back to 4 at step 12, then diverged at 7 after step 9."""
    repeats = (RepeatedSteps(range(5, 13), 500), RepeatedSteps(range(6, 10), 900))
    first = [(step, 100 + step) for step in range(13)]
    second = [(step, 600 + step) for step in range(5, 10)]
    assert newest_repeated_step(first, repeats) is None
    assert newest_repeated_step([*first, *second], repeats) == 5
    third = [(6, 901), (7, 1000)]
    assert newest_repeated_step(sorted([*first, *second, *third]), repeats) == 7
    assert newest_repeated_step(first, [RepeatedSteps(range(5, 13), UNKNOWN_TIME)]) is None


def test_pending_points_are_sent_unless_the_server_has_their_step() -> None:
    resumption = ResumeFilter(step=10, newest={"loss": 9}, repeated=(RepeatedSteps(range(7, 9), 99),))
    pending = [Point("loss", 0.0, step, 1) for step in range(6, 12)] + [Point("eval", 0.0, 8, 1)]
    left = [(point.key, point.step) for point in pending if not resumption.is_logged(point)]
    assert left == [("loss", 7), ("loss", 8), ("loss", 10), ("loss", 11), ("eval", 8)]


def test_newest_steps_are_parsed_with_and_without_metrics() -> None:
    assert parse_newest_steps({"run": {"data": {"metrics": [{"key": "a", "step": 7}, {"key": "b"}]}}}) == {"a": 7, "b": 0}
    assert parse_newest_steps({"run": {"data": {}}}) == {}


def test_delays_grow_to_a_limit() -> None:
    delays = [retry_delay(failures) for failures in range(1, 2000)]
    assert sum(delays[: MAX_ATTEMPTS - 1]) > 60, "a server that is away for a minute"
    assert delays == sorted(delays)
    assert (delays[0] < 1, delays[-1]) == (True, MAX_RETRY_SECONDS)


@pytest.mark.parametrize(
    ("status", "code", "refused"),
    [
        (400, "INVALID_PARAMETER_VALUE", True),
        (409, "RESOURCE_CONFLICT", True),
        (413, "", True),
        (422, "", True),
        *[(404, code, True) for code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE", "BAD_REQUEST")],
        (404, "", False),
        (404, "ENDPOINT_NOT_FOUND", False),
        (401, "UNAUTHENTICATED", False),
        (429, "REQUEST_LIMIT_EXCEEDED", False),
        (500, "INTERNAL_ERROR", False),
        (503, "TEMPORARILY_UNAVAILABLE", False),
    ],
)
def test_permanent_refusals_are_not_retried(status: int, code: str, refused: bool) -> None:
    assert is_refusal(status, code) is refused
