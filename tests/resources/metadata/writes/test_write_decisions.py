"""Group of writes: leaves the same state as its writes executed one after another."""

from collections.abc import Sequence
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resources.errors import HanzoError
from resources.metadata.database import Database
from resources.metadata.field_rules import MetricPoint, metric_point
from resources.metadata.tracking.tracking import Tracking
from resources.metadata.writes.group_commit import write_group
from resources.metadata.writes.write_decisions import RunWrite, run_write

RUNS = ("open", "also open", "deleted", "elsewhere", "unknown")
KEYS = st.sampled_from(["a", 'quote " and \\', "ü", "{,}"])
FEW = st.integers(0, 3)
points = st.builds(
    metric_point, st.sampled_from(["loss", "acc"]), st.sampled_from([0.0, -0.0, 1.5, 1e308, float("nan")]), FEW, FEW
)
texts = st.dictionaries(st.sampled_from(["p", "q"]), KEYS, max_size=2)
tags = st.dictionaries(st.sampled_from(["t", "mlflow.runName"]), KEYS, max_size=2)
requests = st.lists(
    st.tuples(st.sampled_from(RUNS), st.lists(points, max_size=4) | st.lists(points, min_size=60, max_size=60), texts, tags),
    min_size=1,
    max_size=6,
)


def as_writes(drawn: Sequence[tuple[str, list[MetricPoint], dict[str, str], dict[str, str]]], prefix: str) -> list[RunWrite]:
    return [
        run_write(f"{prefix}-{RUNS.index(run)}", metrics, list(params.items()), list(tags.items()), "default")
        for run, metrics, params, tags in drawn
    ]


def new_runs(tracking: Tracking, prefix: str) -> None:
    elsewhere = tracking.experiments.create(prefix, "other").id
    for number, run in enumerate(RUNS[:-1]):
        tracking.runs.create(elsewhere if run == "elsewhere" else 0, run_id=f"{prefix}-{number}", name="first")
    tracking.runs.delete(f"{prefix}-{RUNS.index('deleted')}")


def contents(tracking: Tracking, prefix: str) -> list[object]:
    return [
        [
            tracking.runs.get(run).name,
            tracking.run_data.params(run),
            tracking.run_data.tags(run),
            tracking.metrics.latest(run),
            [tracking.metrics.history(run, key, 1000).points for key in ("acc", "loss")],
        ]
        for run in (f"{prefix}-{number}" for number in range(len(RUNS) - 1))
    ]


def said(refusal: HanzoError | None, prefix: str) -> str:
    return "" if refusal is None else f"{refusal.code} {refusal.message}".replace(prefix, "RUN")


def write(database: Database, writes: Sequence[RunWrite]) -> list[HanzoError | None]:
    with database.write() as connection:
        return write_group(connection.connection, connection.dialect, writes)


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=requests)
def test_group_commit_equals_its_writes_applied_one_by_one(
    database: Database, drawn: list[tuple[str, list[MetricPoint], dict[str, str], dict[str, str]]]
) -> None:
    tracking = Tracking(database)
    tracking.experiments.ensure_default()
    together, alone = uuid4().hex, uuid4().hex
    new_runs(tracking, together)
    new_runs(tracking, alone)
    of_group = [said(refusal, together) for refusal in write(database, as_writes(drawn, together))]
    of_each = [said(write(database, [one])[0], alone) for one in as_writes(drawn, alone)]
    assert of_group == of_each
    assert contents(tracking, together) == contents(tracking, alone)
    check_against_the_rules(tracking, alone, drawn, of_each)


def check_against_the_rules(
    tracking: Tracking,
    prefix: str,
    drawn: Sequence[tuple[str, list[MetricPoint], dict[str, str], dict[str, str]]],
    answers: Sequence[str],
) -> None:
    """Check a result against the simplest formulation of the rules."""
    stored: dict[str, list[MetricPoint]] = {}
    params: dict[str, dict[str, str]] = {}
    for (run, metrics, new, _), answer in zip(drawn, answers, strict=True):
        known = params.setdefault(run, {})
        conflict = any(known.get(key, value) != value for key, value in new.items())
        if run in ("unknown", "elsewhere"):
            assert answer.startswith("RESOURCE_DOES_NOT_EXIST")
        elif run == "deleted":
            assert "must be in the 'active' state" in answer
        elif conflict:
            assert "Changing param values is not allowed" in answer
        else:
            assert answer == ""
            known.update(new)
            stored.setdefault(run, []).extend(metrics)
    for run in ("open", "also open"):
        run_id = f"{prefix}-{RUNS.index(run)}"
        kept = stored.get(run, [])
        assert tracking.run_data.params(run_id) == params.get(run, {})
        for key in ("acc", "loss"):
            of_key = {point for point in kept if point.key == key}
            assert set(tracking.metrics.history(run_id, key, 1000).points) == of_key
            latest = [point for point in tracking.metrics.latest(run_id) if point.key == key]
            assert [age(point) for point in latest] == ([max(map(age, of_key))] if of_key else [])


def age(point: MetricPoint) -> tuple[int, int, float]:
    return point.step, point.timestamp, point.value
