"""Search pages join without gap or repetition, in any order and during concurrent writes."""

import itertools
import math

import pytest
from sqlalchemy import event

from resources.errors import HanzoError
from resources.metadata.database import Database
from resources.metadata.field_rules import metric_point
from resources.metadata.filters.parser import parse_filter, parse_orders
from resources.metadata.tracking.experiment_search import EXPERIMENT_GRAMMAR
from resources.metadata.tracking.run_search import RUN_GRAMMAR
from resources.metadata.tracking.tracking import Tracking

LOSSES = (0.5, None, math.nan, 0.25, 0.5, None, math.nan, -1.0, math.inf, 0.5)


def ten_runs(database: Database) -> Tracking:
    """Create ten runs with ties, NaN, infinity and missing values.

    Every other run started in the same millisecond.
    """
    tracking = Tracking(database)
    tracking.experiments.ensure_default()
    for number, loss in enumerate(LOSSES):
        tracking.runs.create(0, run_id=f"r{number}", name=f"name {number % 4}", start_time=1 + number // 2)
        if loss is not None:
            tracking.run_data.log_metric(f"r{number}", metric_point("loss", loss, 0, 0))
        if number % 3:
            tracking.run_data.log_batch(f"r{number}", params=[("p", str(number % 3))], tags=[("t", "é\n'" * (number % 4))])
        if number % 2:
            tracking.runs.set_status(f"r{number}", "completed", end_time=100 - number)
    return tracking


@pytest.fixture
def tracking(database: Database) -> Tracking:
    return ten_runs(database)


def pages(tracking: Tracking, orders: list[str], limit: int) -> list[list[str]]:
    found: list[list[str]] = []
    token: str | None = None
    while token is not None or not found:
        page = tracking.run_search.search([0], orders=parse_orders(orders, RUN_GRAMMAR), limit=limit, page_token=token)
        found.append([logged.run.id for logged in page.runs])
        token = page.next_page_token
    return found


@pytest.mark.parametrize(
    "orders",
    [
        [],
        ["metrics.loss ASC"],
        ["metrics.loss DESC"],
        ["params.p DESC", "metrics.loss"],
        ["tags.t", "start_time DESC"],
        ["end_time ASC"],
        ["end_time DESC", "run_name"],
        ["status", "run_id DESC"],
        ["metrics.nothing", "tags.nothing"],
    ],
)
def test_pages_join_to_the_whole_search(tracking: Tracking, orders: list[str]) -> None:
    [whole] = pages(tracking, orders, 1000)
    assert sorted(whole) == sorted(f"r{number}" for number in range(len(LOSSES)))
    for limit in (1, 3, 10):
        cut = pages(tracking, orders, limit)
        assert list(itertools.chain(*cut)) == whole
        assert {len(page) for page in cut[:-1]} <= {limit}


def test_numbers_sort_before_nan_and_absence_in_both_directions(tracking: Tracking) -> None:
    [ascending] = pages(tracking, ["metrics.loss"], 100)
    [descending] = pages(tracking, ["metrics.loss DESC"], 100)
    # Ties by start time, the newest first, then by id.
    assert ascending == ["r7", "r3", "r9", "r4", "r0", "r8", "r6", "r2", "r5", "r1"]
    assert descending == ["r8", "r9", "r4", "r0", "r3", "r7", "r6", "r2", "r5", "r1"]


def test_statuses_are_ordered_by_their_mlflow_names(tracking: Tracking) -> None:
    [found] = pages(tracking, ["status ASC"], 100)
    assert [int(run_id[1:]) % 2 for run_id in found] == [1] * 5 + [0] * 5  # FINISHED comes before RUNNING


def test_run_created_between_pages_does_not_shift_them(database: Database) -> None:
    tracking = Tracking(database)
    tracking.experiments.ensure_default()
    for number in range(4):
        tracking.runs.create(0, run_id=f"old{number}", start_time=number + 1)
    first = tracking.run_search.search([0], limit=2)
    tracking.runs.create(0, run_id="new", start_time=99)
    tracking.runs.delete("old3")
    second = tracking.run_search.search([0], limit=2, page_token=first.next_page_token)
    assert [logged.run.id for logged in [*first.runs, *second.runs]] == ["old3", "old2", "old1", "old0"]


def test_a_token_of_another_order_is_refused(tracking: Tracking) -> None:
    token = tracking.run_search.search([0], orders=parse_orders(["metrics.loss"], RUN_GRAMMAR), limit=2).next_page_token
    assert token is not None
    for orders in ([], ["metrics.other"], ["metrics.loss DESC"]):
        with pytest.raises(HanzoError, match="Invalid page token"):
            tracking.run_search.search([0], orders=parse_orders(orders, RUN_GRAMMAR), limit=2, page_token=token)


def test_logged_values_are_looked_up_by_run_without_a_table_scan(sqlite_url: str) -> None:
    """Otherwise the cost would grow with every metric of every other run."""
    database = Database(sqlite_url)
    tracking = ten_runs(database)
    statements: list[str] = []
    event.listen(database.engine, "checkout", lambda driver, *_: driver.set_trace_callback(statements.append))
    pages(tracking, ["metrics.loss DESC", "params.p", "tags.t"], 3)
    searches = [text for text in statements if "ORDER BY" in text and "LEFT OUTER JOIN" in text]
    assert len(searches) == 4
    for text in searches:
        plan = plan_of(database, text)
        assert len(plan) == 4
        assert [step for step in plan if step.startswith("SCAN")] == []


def test_order_values_are_looked_up_only_for_filtered_runs(sqlite_url: str) -> None:
    database = Database(sqlite_url)
    tracking = ten_runs(database)
    statements: list[str] = []
    event.listen(database.engine, "checkout", lambda driver, *_: driver.set_trace_callback(statements.append))
    conditions = parse_filter("params.p = '1' and metrics.loss > 0", RUN_GRAMMAR)
    tracking.run_search.search([0], conditions=conditions, orders=parse_orders(["tags.t"], RUN_GRAMMAR))
    [search] = [text for text in statements if "LEFT OUTER JOIN" in text]
    assert plan_of(database, search)[-1].endswith("LEFT-JOIN")


def plan_of(database: Database, statement: str) -> list[str]:
    """Return the tables that SQLite reads for a statement, in order."""
    with database.read() as connection:
        plan = [str(row.detail) for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}")]
    return [step for step in plan if step.startswith(("SCAN", "SEARCH"))]


def test_experiments_are_ordered_and_paged_as_in_mlflow(tracking: Tracking) -> None:
    for name in ("a", "ab", "Abc"):
        tracking.experiments.create(name, "org")

    def found(text: str, *orders: str) -> list[str]:
        names: list[str] = []
        token: str | None = None
        while token is not None or not names:
            page = tracking.experiment_search.search(
                "org",
                conditions=parse_filter(text, EXPERIMENT_GRAMMAR),
                orders=parse_orders(orders, EXPERIMENT_GRAMMAR),
                limit=2,
                page_token=token,
            )
            names += [experiment.name for experiment in page.experiments]
            token = page.next_page_token
            if not names:
                break
        return names

    ids = {name: str(tracking.experiments.get_by_name(name, "org").id) for name in ("a", "ab", "Abc")}
    assert found("", "name DESC") == ["ab", "a", "Abc"]
    assert found("", "experiment_id ASC") == ["a", "ab", "Abc"]
    assert found("", "last_update_time DESC", "name") == found("", "creation_time DESC", "name")
    assert found(f"experiment_id IN ('{ids['a']}', '{ids['Abc']}')", "name") == ["Abc", "a"]
    assert found(f"experiment_id != '{ids['a']}' AND name LIKE 'a%'") == ["ab"]
    assert found("experiment_id = '99999'") == []
