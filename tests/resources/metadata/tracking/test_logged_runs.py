"""Run search returns exactly the stored values, to the last bit, on every read path."""

import math

import pytest
from sqlalchemy import Table, select

from resources.metadata.database import Database
from resources.metadata.field_rules import metric_point
from resources.metadata.tables import latest_metrics, params, run_tags
from resources.metadata.tracking import logged_runs
from resources.metadata.tracking.logged_runs import LoggedRun
from resources.metadata.tracking.run_inputs import Dataset, DatasetInput
from resources.metadata.tracking.tracking import Tracking

TEXTS = ('"', "\\", "\\u0041", "'", "\n\t\x01\x7f", "é 😀 \u2028", "", "null", "1", "%s :ids", "{", "x" * 6000)
NUMBERS = (0.1 + 0.2, 1 / 3, 5e-324, math.inf, -math.inf, math.nan, -0.0, 1.0, 1e22, 123456789.123456789)
RUNS = 7


@pytest.fixture
def tracking(database: Database) -> Tracking:
    """Create runs with difficult values, one empty run, and some runs with inputs.

    The keys are not written in their sort order.
    """
    tracking = Tracking(database)
    tracking.experiments.ensure_default()
    for number in range(RUNS):
        tracking.runs.create(0, run_id=f"r{number}", name=f"n{number}", start_time=number + 1)
    for number in range(1, RUNS):
        run_id = f"r{number}"
        keys = [f"{letter}{number}/{place}" for place, letter in enumerate("bA_za.C9mé"[: 6 + number % 3])]
        for place, key in enumerate(keys):
            text, value = TEXTS[(place + 2 * number) % len(TEXTS)], NUMBERS[(place + 3 * number) % len(NUMBERS)]
            tracking.run_data.log_batch(
                run_id, [metric_point(key, value, place - 2**40, 2**53 + place)], [(key, text)], [(key, text[::-1])]
            )
    for run_id, name in (("r2", "b"), ("r2", "a"), ("r5", "a")):
        tracking.inputs.log(run_id, [DatasetInput(Dataset(name, "d", "local", "{}"), {"mlflow.data.context": "eval"})])
    return tracking


def stored(database: Database, table: Table, run_id: str, *columns: str) -> list[tuple[object, ...]]:
    with database.read() as reader:
        rows = reader.execute(select(*(table.c[name] for name in columns)).where(table.c.run_id == run_id))
        return sorted(tuple(row) for row in rows)


@pytest.mark.parametrize("chunk", [2, 500])
def test_runs_are_read_with_their_stored_params_tags_and_metrics(
    database: Database, tracking: Tracking, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logged_runs, "CHUNK", chunk)
    found = tracking.run_search.search([0]).runs
    assert [logged.run for logged in found] == [tracking.runs.get(f"r{number}") for number in reversed(range(RUNS))]
    for logged in found:
        run_id = logged.run.id
        assert list(logged.params.items()) == stored(database, params, run_id, "key", "value")
        assert list(logged.tags.items()) == stored(database, run_tags, run_id, "key", "value")
        points = [point[:5] for point in logged.metrics]
        # repr distinguishes -0.0 from 0.0 and True from 1.
        assert repr(points) == repr(stored(database, latest_metrics, run_id, "key", "value", "step", "timestamp", "is_nan"))
        assert logged == tracking.run_search.get(logged.run)
    assert datasets(found) == {"r2": ["b", "a"], "r5": ["a"]}


def datasets(found: list[LoggedRun]) -> dict[str, list[str]]:
    return {logged.run.id: [used.dataset.name for used in logged.inputs] for logged in found if logged.inputs}
