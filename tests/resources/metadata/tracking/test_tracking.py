"""Runs, params, tags and metrics: storage, refusals and events."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from resources.errors import ErrorCode, HanzoError
from resources.metadata.database import Database
from resources.metadata.field_rules import LARGEST_DOUBLE, MetricPoint, metric_point
from resources.metadata.outbox import Event, read_after
from resources.metadata.tracking.experiments import DEFAULT_ORGANIZATION
from resources.metadata.tracking.tracking import Tracking


@pytest.fixture
def tracking(database: Database) -> Tracking:
    tracking = Tracking(database)
    tracking.experiments.ensure_default()
    return tracking


@pytest.fixture
def run_id(tracking: Tracking) -> str:
    return tracking.runs.create(0, run_id="run").id


def events(database: Database) -> list[Event]:
    with database.read() as connection:
        return read_after(connection, 0)


def test_the_default_experiment_is_made_once(tracking: Tracking) -> None:
    tracking.experiments.ensure_default()
    found = tracking.experiment_search.search("default").experiments
    assert [(experiment.id, experiment.name) for experiment in found] == [(0, "Default")]


def test_an_experiment_name_is_unique_in_its_organization_only(tracking: Tracking) -> None:
    tracking.experiments.create("same", "one")
    tracking.experiments.create("same", "two")
    with pytest.raises(HanzoError, match=r"Experiment\(name=same\) already exists") as refusal:
        tracking.experiments.create("same", "one")
    assert refusal.value.code is ErrorCode.RESOURCE_ALREADY_EXISTS


def test_a_failed_creation_leaves_the_callers_transaction_usable(tracking: Tracking) -> None:
    tracking.experiments.create("taken", "one")
    with tracking.write() as connection:
        with pytest.raises(HanzoError):
            tracking.experiments.create("taken", "one", connection=connection)
        tracking.experiments.create("free", "one", connection=connection)
    assert tracking.experiments.get_by_name("free", "one").name == "free"


def test_concurrent_ensure_creates_an_experiment_once(tracking: Tracking) -> None:
    """Regression: the second of two jobs or sweeps in a new experiment was refused."""
    together = threading.Barrier(8, timeout=30)

    def ensure(_: int) -> int:
        together.wait()
        return tracking.experiments.ensure("new", "one").id

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ensure, range(8)))
    assert len(set(found)) == 1


def test_ensure_creates_a_run_once_and_then_leaves_it_unchanged(tracking: Tracking, database: Database) -> None:
    first = tracking.runs.ensure("chosen", "names", "first", "ada", "org", {"team": "x"})
    tracking.runs.set_status("chosen", "running")
    again = tracking.runs.ensure("chosen", "names", "second", "bob", "org")
    assert (first.status, again.status, again.name, again.user_id) == ("queued", "running", "first", "ada")
    assert [event.type for event in events(database)] == ["run.created", "run.updated"]
    assert tracking.run_data.tags("chosen") == {"mlflow.runName": "first", "team": "x"}


def test_a_change_of_status_and_its_event_are_one_transaction(tracking: Tracking, database: Database, run_id: str) -> None:
    before = events(database)
    with pytest.raises(RuntimeError), database.write() as connection:
        tracking.runs.set_status(run_id, "failed", connection=connection)
        raise RuntimeError("the caller fails")
    assert (tracking.runs.get(run_id).status, events(database)) == ("running", before)
    with database.write() as connection:
        tracking.runs.set_status(run_id, "failed", connection=connection)
    last = events(database)[-1]
    assert (last.topic, last.type, last.key) == ("jobs", "run.updated", run_id)
    assert (last.payload["previous_status"], last.payload["status"]) == ("running", "failed")


def test_setting_the_same_status_again_writes_no_event(tracking: Tracking, database: Database, run_id: str) -> None:
    tracking.runs.set_status(run_id, "completed")
    ended = tracking.runs.get(run_id)
    count = len(events(database))
    tracking.runs.set_status(run_id, "completed")
    assert (tracking.runs.get(run_id), len(events(database))) == (ended, count)


def test_resumed_run_has_no_end_time(tracking: Tracking, run_id: str) -> None:
    assert tracking.runs.set_status(run_id, "failed").end_time is not None
    assert tracking.runs.set_status(run_id, "running").end_time is None
    assert tracking.runs.set_status(run_id, "completed", end_time=77).end_time == 77


def test_unknown_status_is_refused(tracking: Tracking, run_id: str) -> None:
    with pytest.raises(HanzoError, match="must be one of queued, running, completed, failed, cancelled"):
        tracking.runs.set_status(run_id, "FINISHED")


@pytest.mark.requirement("E2")
def test_param_accepts_only_its_first_value_again(tracking: Tracking, run_id: str) -> None:
    tracking.run_data.log_param(run_id, "lr", "0.1")
    tracking.run_data.log_param(run_id, "lr", "0.1")
    with pytest.raises(HanzoError, match="Changing param values is not allowed") as refusal:
        tracking.run_data.log_batch(run_id, params=[("new", "1"), ("lr", "0.2")])
    assert refusal.value.code is ErrorCode.INVALID_PARAMETER_VALUE
    assert tracking.run_data.params(run_id) == {"lr": "0.1"}


def test_refusal_keeps_the_prepared_statements_of_the_connection(tracking: Tracking, run_id: str) -> None:
    """From the sixth query on psycopg prepares statements, and deallocates them all at a rollback."""
    for step in range(3):
        for _ in range(7):
            tracking.runs.get(run_id)
            tracking.run_data.params(run_id)
        tracking.run_data.log_batch(run_id, [metric_point("loss", 1.0, step, step)], [("a", "1")])
        with pytest.raises(HanzoError, match="Changing param values is not allowed"):
            tracking.run_data.log_batch(run_id, params=[("a", "2")])
        with pytest.raises(HanzoError, match="already exists"):
            tracking.experiments.create("Default", DEFAULT_ORGANIZATION)
    assert len(tracking.metrics.history(run_id, "loss", 10).points) == 3


def test_a_refusal_names_every_param_that_would_change(tracking: Tracking, run_id: str) -> None:
    """MLflow uses another message for a single param."""
    tracking.run_data.log_batch(run_id, params=[("lr", "0.1"), ("seed", "1")])
    changes = "[{'key': 'lr', 'old_value': '0.1', 'new_value': '0.2'}, {'key': 'seed', 'old_value': '1', 'new_value': '2'}]"
    with pytest.raises(HanzoError) as refusal:
        tracking.run_data.log_batch(run_id, params=[("new", "1"), ("lr", "0.2"), ("seed", "2")])
    assert f"Params were already logged='{changes}' for run ID='{run_id}'." in refusal.value.message
    with pytest.raises(HanzoError, match="Param with key='lr' was already logged"):
        tracking.run_data.log_param(run_id, "lr", "0.2")


def test_duplicate_param_in_one_request_is_refused(tracking: Tracking, run_id: str) -> None:
    with pytest.raises(HanzoError, match="Duplicate parameter keys"):
        tracking.run_data.log_batch(run_id, params=[("a", "1"), ("a", "1")])


def test_a_batch_sent_again_changes_nothing(tracking: Tracking, run_id: str) -> None:
    points = [metric_point("loss", value, step, 5) for step, value in enumerate((3.0, 2.0, math.nan))]
    for _ in range(2):
        tracking.run_data.log_batch(run_id, points, [("a", "1")], [("t", "1")])
    assert tracking.metrics.history(run_id, "loss", 100).points == points


def test_latest_metric_is_not_replaced_by_an_older_point(tracking: Tracking, run_id: str) -> None:
    newest = metric_point("loss", 1.0, 10, 100)
    tracking.run_data.log_metric(run_id, newest)
    for older in (metric_point("loss", 9.0, 9, 900), metric_point("loss", 9.0, 10, 99), metric_point("loss", 0.5, 10, 100)):
        tracking.run_data.log_metric(run_id, older)
        assert tracking.metrics.latest(run_id) == [newest]
    larger = metric_point("loss", 1.5, 10, 100)
    tracking.run_data.log_batch(run_id, [larger, metric_point("acc", 0.5, 1, 1), newest])
    assert tracking.metrics.latest(run_id) == [metric_point("acc", 0.5, 1, 1), larger]


def test_nan_and_infinity_are_kept_as_mlflow_keeps_them() -> None:
    assert metric_point("a", math.nan, 0, 0) == MetricPoint("a", 0.0, 0, 0, is_nan=True)
    assert math.isnan(metric_point("a", math.nan, 0, 0).number)
    assert metric_point("a", -math.inf, 0, 0).value == -LARGEST_DOUBLE


def test_history_pages_join_without_gap_or_repetition(tracking: Tracking, run_id: str) -> None:
    points = [metric_point("loss", float(step % 3), step // 2, step % 2) for step in range(25)]
    tracking.run_data.log_batch(run_id, points)
    found, token = [], None
    for _ in range(len(points)):
        page = tracking.metrics.history(run_id, "loss", 4, token)
        found.append(page.points)
        token = page.next_page_token
        if token is None:
            break
    by_step = sorted(points, key=lambda point: (point.step, point.timestamp, point.value))
    pages = [by_step[start : start + 4] for start in range(0, len(by_step), 4)]
    assert found == [sorted(page, key=lambda point: (point.timestamp, point.step, point.value)) for page in pages]


def test_history_is_in_mlflow_order(tracking: Tracking, run_id: str) -> None:
    """Order is by time, not step: a resumed run logs earlier steps later."""
    first, again = metric_point("loss", 1.0, 5, 1000), metric_point("loss", 2.0, 0, 2000)
    same_time = [metric_point("loss", value, step, 3000) for step, value in ((1, 2.0), (2, 0.0), (2, 1.0))]
    tracking.run_data.log_batch(run_id, [*reversed(same_time), again, first])
    assert tracking.metrics.history(run_id, "loss", 10).points == [first, again, *same_time]


@pytest.mark.parametrize("token", ["x", "W10=", "WzEsMl0=", "WzEsMiwzLjAsMF0=", "bnVsbA=="])
def test_invalid_page_token_is_refused(tracking: Tracking, run_id: str, token: str) -> None:
    with pytest.raises(HanzoError, match="Invalid page token"):
        tracking.metrics.history(run_id, "loss", 4, token)


@pytest.mark.parametrize("key", ["", "/a", "a//b", "../a", "a/./b", "a\n", "a#b", "a" * 251, "a/"])
def test_metric_key_that_is_not_a_normal_path_is_refused(tracking: Tracking, run_id: str, key: str) -> None:
    with pytest.raises(HanzoError) as refusal:
        tracking.run_data.log_metric(run_id, metric_point(key, 1.0, 0, 0))
    assert refusal.value.code is ErrorCode.INVALID_PARAMETER_VALUE


@pytest.mark.parametrize(("step", "timestamp"), [(2**63, 0), (0, 2**63), (0, -1), (-(2**63) - 1, 0)])
def test_step_or_timestamp_beyond_the_database_range_is_refused(step: int, timestamp: int) -> None:
    with pytest.raises(HanzoError, match="long"):
        metric_point("a", 1.0, step, timestamp)


def test_batch_beyond_its_limits_is_refused(tracking: Tracking, run_id: str) -> None:
    with pytest.raises(HanzoError, match=r"at most 1000 metrics\. Got 1001 metrics"):
        tracking.run_data.log_batch(run_id, [metric_point("a", 1.0, step, 0) for step in range(1001)])
    with pytest.raises(HanzoError, match="at most 100 params"):
        tracking.run_data.log_batch(run_id, params=[(f"p{number}", "1") for number in range(101)])


def test_deleted_run_accepts_no_write_until_it_is_restored(tracking: Tracking, run_id: str) -> None:
    tracking.runs.delete(run_id)
    for write in (
        lambda: tracking.run_data.log_param(run_id, "a", "1"),
        lambda: tracking.run_data.log_metric(run_id, metric_point("a", 1.0, 0, 0)),
        lambda: tracking.run_data.set_tag(run_id, "a", "1"),
        lambda: tracking.runs.set_status(run_id, "completed"),
    ):
        with pytest.raises(HanzoError, match="must be in the 'active' state"):
            write()
    tracking.runs.restore(run_id)
    tracking.run_data.log_param(run_id, "a", "1")
    assert tracking.run_data.params(run_id) == {"a": "1"}


def test_run_name_and_its_tag_stay_equal(tracking: Tracking) -> None:
    run = tracking.runs.create(0, name="first")
    tracking.run_data.set_tag(run.id, "mlflow.runName", "second")
    assert tracking.runs.get(run.id).name == "second"
    tracking.runs.update(run.id, name="third")
    assert tracking.run_data.tags(run.id)["mlflow.runName"] == "third"
    with pytest.raises(HanzoError, match="different values"):
        tracking.runs.create(0, name="a", tags={"mlflow.runName": "b"})


def test_text_that_the_database_cannot_store_is_refused(tracking: Tracking, run_id: str) -> None:
    for text in ("a\x00b", "\ud800"):
        with pytest.raises(HanzoError, match="cannot be stored"):
            tracking.run_data.set_tag(run_id, "t", text)
