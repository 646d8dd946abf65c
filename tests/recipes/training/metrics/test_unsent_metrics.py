"""Metric points that no tracking server received are stored with the result.

Those of an earlier attempt are replaced.
"""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hanzo_ml.client import buffer
from hanzo_ml.client.buffer import MetricBuffer
from hanzo_ml.client.points import Point
from hanzo_ml.client.repeated_steps import RepeatedSteps
from recipes.contracts.results import UnsentPoint, read_unsent_metrics, write_unsent_metrics
from recipes.train import METRICS_GRACE_SECONDS, build_unsent_point
from recipes.training.metrics.tracking import open_metric_buffer, write_pending_metrics
from tests.recipes.training.training_workspace import Place, facts


def test_unsent_metrics_are_stored_with_the_result_when_server_never_answers(
    place: Place, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = facts(place.train(tmp_path / "unheard"))
    left = list(read_unsent_metrics(place.store, "s3://hanzo-ml/runs/unheard"))
    assert len(left) == result.unsent_metrics
    losses = [(point.step, point.value) for point in left if point.key == "train/loss"]
    assert losses and losses == sorted(result.losses.items()), "each step once"
    assert f"{len(left)} metric points stored with the result" in capfd.readouterr().out


def test_non_finite_metrics_round_trip_and_replace_earlier_ones(place: Place) -> None:
    folder, values = "s3://hanzo-ml/runs/odd", (0.1, float("inf"), float("-inf"), float("nan"))
    write_unsent_metrics(place.store, folder, [UnsentPoint(key="from before", value=1.0, step=1, timestamp=1)])
    write_unsent_metrics(place.store, folder, [UnsentPoint(key="é x", value=value, step=2, timestamp=3) for value in values])
    *plain, nan = read_unsent_metrics(place.store, folder)
    assert [point.value for point in plain] == list(values[:3]) and math.isnan(nan.value)
    assert {(point.key, point.step, point.timestamp) for point in (*plain, nan)} == {("é x", 2, 3)}


def test_unsent_point_of_a_repeated_step_records_the_repeat_time() -> None:
    """It prevents logging a point twice that arrived without an acknowledgement."""
    repeated = (RepeatedSteps(range(5, 9), 1500), RepeatedSteps.from_time(range(8, 9), None))
    points = [build_unsent_point(Point("train/loss", 0.5, step, 2000), repeated) for step in (4, 5, 8)]
    assert [(point.anew, point.since) for point in points] == [(False, None), (True, 1500), (True, None)]


class Ahead:
    """A tracking server that already has step 4; it records its calls in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def newest_steps(self, run_id: str) -> dict[str, int]:
        self.calls.append("asked")
        return {"train/loss": 4}

    def log_metrics(self, run_id: str, points: Sequence[Point]) -> None:
        self.calls += [f"{point.key} {point.step}" for point in points]

    def close(self) -> None:
        pass


def test_pending_points_are_sent_only_after_server_reported_its_newest_steps(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender used to start before all newest steps were known.

    In one of 85 starts, a repeated step was then logged twice.
    """
    server, tell = Ahead(), MetricBuffer.skip_until

    def late(*given: Any, **named: Any) -> None:
        time.sleep(0.2)
        tell(*given, **named)

    monkeypatch.setattr(buffer, "Transport", lambda uri: server)
    monkeypatch.setattr(MetricBuffer, "skip_until", late)
    pending = [Point("train/loss", 0.5, 4, 2000), Point("eval/loss", 0.7, 4, 2000)]
    write_pending_metrics(pending, tmp_path)
    metrics = open_metric_buffer(place.job(tmp_path, {}), (4, tmp_path), (), evaluates_on_resume=False)
    assert metrics.close(60) == []
    assert server.calls == ["asked", "eval/loss 4"]


def test_metrics_grace_period_is_60_seconds() -> None:
    assert METRICS_GRACE_SECONDS == 60
