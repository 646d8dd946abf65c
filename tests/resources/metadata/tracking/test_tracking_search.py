"""MLflow's filter and order language: results, their order, and refusals."""

import math

import pytest

from resources.errors import HanzoError
from resources.metadata.database import Database
from resources.metadata.field_rules import metric_point
from resources.metadata.filters.parser import parse_filter, parse_orders
from resources.metadata.tracking.experiment_search import EXPERIMENT_GRAMMAR
from resources.metadata.tracking.run_search import RUN_GRAMMAR
from resources.metadata.tracking.tracking import Tracking


@pytest.fixture(scope="module")
def tracking(tmp_path_factory: pytest.TempPathFactory) -> Tracking:
    database = Database(f"sqlite:///{tmp_path_factory.mktemp('search') / 'test.db'}")
    database.migrate()
    tracking = Tracking(database)
    tracking.experiments.ensure_default()
    losses = {"a": 0.1, "b": 0.3, "c": math.nan, "d": None}
    for number, (name, loss) in enumerate(losses.items()):
        tracking.runs.create(
            0, run_id=name, name=f"Run-{name}", user_id="ada" if number < 2 else "bob", start_time=number + 1
        )
        if loss is not None:
            tracking.run_data.log_metric(name, metric_point("train/loss", loss, 1, 1))
    tracking.run_data.log_batch("a", params=[("model", "zen"), ("a.b", "x")], tags=[("team", "Blue_1")])
    tracking.run_data.log_batch("b", params=[("model", "other")], tags=[("team", "bluex1")])
    tracking.runs.set_status("a", "completed", end_time=50)
    return tracking


def found(tracking: Tracking, text: str, *orders: str) -> list[str]:
    page = tracking.run_search.search(
        [0], conditions=parse_filter(text, RUN_GRAMMAR), orders=parse_orders(orders, RUN_GRAMMAR)
    )
    return [logged.run.id for logged in page.runs]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "dcba"),
        ("metrics.`train/loss` < 0.2", "a"),
        ('metric."train/loss" <= 3e-1', "ba"),
        ("metrics.train/loss >= -1", "ba"),
        ("metrics.train/loss != 0.1", "cb"),
        ("metrics.train/loss = 0", ""),
        ("params.model = 'zen'", "a"),
        ("param.model != 'zen'", "b"),
        ('parameters.a.b = "x"', "a"),
        ("params.model IS NULL", "dc"),
        ("params.model is not null and user_id = 'ada'", "ba"),
        ("tags.team LIKE 'Blue%'", "a"),
        ("tags.team LIKE 'blue_1'", "b"),
        ("tags.team ILIKE 'BLUE_1'", "ba"),
        ("tags.team LIKE 'Blue*'", ""),
        ("attributes.status = 'completed'", "a"),
        ("status IN ('completed', 'failed')", "a"),
        ("run_id NOT IN ('a', 'b')", "dc"),
        ("attr.run_name ILIKE 'run-a'", "a"),
        ("run.`Run name` = 'Run-b'", "b"),
        ("start_time >= 3", "dc"),
        ("end_time < 51", "a"),
        ("params.model = '; DROP TABLE runs --'", ""),
    ],
)
def test_filter_finds_the_expected_runs(tracking: Tracking, text: str, expected: str) -> None:
    assert "".join(found(tracking, text)) == expected


@pytest.mark.parametrize(
    ("orders", "expected"),
    [
        (["metrics.train/loss"], "abcd"),
        (["metrics.`train/loss` DESC"], "bacd"),
        (["params.model ASC"], "badc"),
        (["attributes.start_time asc"], "abcd"),
        (["user_id", "start_time"], "abcd"),
    ],
)
def test_orders_put_nan_and_absence_last(tracking: Tracking, orders: list[str], expected: str) -> None:
    assert "".join(found(tracking, "", *orders)) == expected


@pytest.mark.parametrize(
    "text",
    [
        "metrics.a = 'x'",
        "metrics.a",
        "metrics.a LIKE 'x'",
        "nothing.a = 1",
        "unknown = 'x'",
        "params.a = 1",
        "params.a = x",
        "params.a > 'x'",
        "params.a = 'x' OR params.b = 'y'",
        "params.a = 'x' params.b = 'y'",
        "params.a = 'x' AND",
        "AND",
        "run_id IN ()",
        "run_id IN ('a',,)",
        "run_id IN 'a'",
        "status IS NULL",
        "params.a = 'x",
        "start_time = 'x'",
        "((((",
        "params.a = 'x\x00'",
        " AND ".join(["params.a = 'x'"] * 101),
    ],
)
def test_invalid_filter_is_refused(text: str) -> None:
    with pytest.raises(HanzoError) as refusal:
        parse_filter(text, RUN_GRAMMAR)
    assert refusal.value.code == "INVALID_PARAMETER_VALUE"


@pytest.mark.parametrize("text", ["", "metrics.a UP", "metrics.a DESC DESC", "unknown", "= 1", "nothing.a"])
def test_invalid_order_is_refused(text: str) -> None:
    with pytest.raises(HanzoError):
        parse_orders([text], RUN_GRAMMAR)


def test_pages_join_without_gap_or_repetition(tracking: Tracking) -> None:
    first = tracking.run_search.search([0], limit=3)
    second = tracking.run_search.search([0], limit=3, page_token=first.next_page_token)
    assert [logged.run.id for logged in [*first.runs, *second.runs]] == ["d", "c", "b", "a"]
    assert second.next_page_token is None


def test_run_is_read_with_its_params_tags_and_metrics(tracking: Tracking) -> None:
    logged = tracking.run_search.get(tracking.runs.get("a"))
    assert (logged.params, logged.tags["team"]) == ({"model": "zen", "a.b": "x"}, "Blue_1")
    assert logged.metrics == [metric_point("train/loss", 0.1, 1, 1)]


def test_deleted_runs_are_found_only_when_asked_for(tracking: Tracking) -> None:
    tracking.runs.delete("d")
    assert found(tracking, "") == ["c", "b", "a"]
    page = tracking.run_search.search([0], lifecycle_stages=("deleted",))
    assert [logged.run.id for logged in page.runs] == ["d"]
    tracking.runs.restore("d")


def test_experiments_are_found_by_name_and_tag(tracking: Tracking) -> None:
    tracking.experiments.create("Vision", "default", tags={"team": "x"})
    tracking.experiments.create("Text", "default")
    tracking.experiments.create("Vision", "other")

    def names(text: str, *orders: str) -> list[str]:
        page = tracking.experiment_search.search(
            "default", conditions=parse_filter(text, EXPERIMENT_GRAMMAR), orders=parse_orders(orders, EXPERIMENT_GRAMMAR)
        )
        return [experiment.name for experiment in page.experiments]

    assert names("tags.team = 'x'") == ["Vision"]
    assert names("name LIKE 'V%'") == ["Vision"]
    assert names("", "name DESC") == ["Vision", "Text", "Default"]
