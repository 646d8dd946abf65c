"""Points that no tracking server got by the end of a run: all of them lie beside its result, none of an earlier end does."""

import math
from pathlib import Path

import pytest

from recipes.train import METRICS_GRACE_SECONDS
from recipes.unsent_metrics import UnsentPoint, read_unsent, write_unsent
from tests.recipes.training.place import Place, facts


def test_a_run_whose_tracking_server_never_answered_leaves_every_point_beside_its_result(
    place: Place, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = facts(place.train(tmp_path / "unheard"))
    left = list(read_unsent(place.store, "s3://hanzo-ml/runs/unheard"))
    assert len(left) == result.unsent_metrics
    losses = [(point.step, point.value) for point in left if point.key == "train/loss"]
    assert losses and losses == sorted(result.losses.items()), "each step once"
    assert f"{len(left)} metric points go with the result" in capfd.readouterr().out


def test_what_is_not_finite_comes_back_as_it_was_and_an_earlier_end_is_replaced(place: Place) -> None:
    folder, values = "s3://hanzo-ml/runs/odd", (0.1, float("inf"), float("-inf"), float("nan"))
    write_unsent(place.store, folder, [UnsentPoint(key="from before", value=1.0, step=1, timestamp=1)])
    write_unsent(place.store, folder, [UnsentPoint(key="é x", value=value, step=2, timestamp=3) for value in values])
    *plain, nan = read_unsent(place.store, folder)
    assert [point.value for point in plain] == list(values[:3]) and math.isnan(nan.value)
    assert {(point.key, point.step, point.timestamp) for point in (*plain, nan)} == {("é x", 2, 3)}


def test_a_gpu_waits_no_longer_than_a_restart_of_the_server_takes() -> None:
    assert METRICS_GRACE_SECONDS == 60
