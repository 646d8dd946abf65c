"""Logged models: storage, refusals, search and events."""

import math

import pytest

from resources.errors import ErrorCode, HanzoError
from resources.metadata.database import Database
from resources.metadata.field_rules import metric_point
from resources.metadata.filters.pagination import Keyset, SortKey, encode_token
from resources.metadata.filters.parser import parse_filter
from resources.metadata.outbox import read_after
from resources.metadata.tables import logged_models
from resources.metadata.tracking.logged_model_records import write_model_points
from resources.metadata.tracking.logged_model_search import LOGGED_MODEL_GRAMMAR, MeasuredOn, ModelOrder
from resources.metadata.tracking.run_inputs import Dataset, DatasetInput, RunModel
from resources.metadata.tracking.run_search import RUN_GRAMMAR
from resources.metadata.tracking.tracking import Tracking


@pytest.fixture
def tracking(database: Database) -> Tracking:
    tracking = Tracking(database)
    tracking.experiments.ensure_default()
    tracking.runs.create(0, run_id="run")
    return tracking


def found(tracking: Tracking, text: str = "", *datasets: MeasuredOn, orders: tuple[ModelOrder, ...] = ()) -> str:
    """Return the names that a search finds, reading one model per page."""
    names: list[str] = []
    token: str | None = None
    while True:
        page = tracking.logged_model_search.search(
            [0],
            conditions=parse_filter(text, LOGGED_MODEL_GRAMMAR),
            datasets=datasets,
            orders=orders,
            limit=1,
            page_token=token,
        )
        names += [details.model.name for details in page.models]
        token = page.next_page_token
        if token is None:
            return "".join(names)


def test_logged_model_lifecycle_writes_its_events(tracking: Tracking, database: Database) -> None:
    made = tracking.logged_models.create(0, name="m", source_run_id="run", params={"a": "1"}, tags={"t": "x"}).model
    assert made.artifact_uri == f"mlflow-artifacts:/0/models/{made.id}/artifacts"
    assert tracking.logged_models.finalize(made.id, "ready").model.status == "ready"
    tracking.logged_models.delete(made.id)
    with pytest.raises(HanzoError, match="not found") as refusal:
        tracking.logged_models.get(made.id)
    assert refusal.value.code is ErrorCode.RESOURCE_DOES_NOT_EXIST
    assert tracking.logged_models.get(made.id, allow_deleted=True).lifecycle_stage == "deleted"
    with database.read() as connection:
        events = [event for event in read_after(connection, 0) if event.topic == "models"]
    assert [(event.type, event.payload["status"], event.payload["lifecycle_stage"]) for event in events] == [
        ("logged_model.created", "pending", "active"),
        ("logged_model.updated", "ready", "active"),
        ("logged_model.updated", "ready", "deleted"),
    ]


def test_model_params_are_immutable_and_tags_are_not(tracking: Tracking) -> None:
    model = tracking.logged_models.create(0, params={"a": "1"}, tags={"t": "x"}).model
    tracking.logged_models.log_params(model.id, {"a": "1", "b": "2"})
    with pytest.raises(HanzoError, match="Changing param values is not allowed"):
        tracking.logged_models.log_params(model.id, {"c": "3", "a": "2"})
    details = tracking.logged_models.set_tags(model.id, {"t": "y", "u": ""})
    assert (details.params, details.tags) == ({"a": "1", "b": "2"}, {"t": "y", "u": ""})
    tracking.logged_models.delete_tag(model.id, "t")
    with pytest.raises(HanzoError, match="No tag with key 't' found"):
        tracking.logged_models.delete_tag(model.id, "t")


@pytest.mark.parametrize("name", ["a/b", "a:b", "a.b", "a%b", 'a"b', "a'b", "n" * 501, "\x00"])
def test_model_name_that_is_invalid_in_a_path_is_refused(tracking: Tracking, name: str) -> None:
    with pytest.raises(HanzoError) as refusal:
        tracking.logged_models.create(0, name=name)
    assert refusal.value.code is ErrorCode.INVALID_PARAMETER_VALUE


def test_model_metrics_are_stored_with_the_metrics_of_their_run(tracking: Tracking, database: Database) -> None:
    model = tracking.logged_models.create(0, name="m").model
    points = [
        metric_point("acc", 0.5, 1, 1, "", model.id, "data", "d1"),
        metric_point("acc", math.nan, 2, 1, "", model.id),
        metric_point("acc", 0.7, 3, 1),
    ]
    for _ in range(2):
        with database.write() as connection:
            write_model_points(connection, "run", points)
    stored = tracking.logged_models.details(model).metrics
    assert [(metric.run_id, metric.point) for metric in stored] == [("run", points[0]), ("run", points[1])]
    with pytest.raises(HanzoError, match="Logged model with ID 'm-none' not found"), database.write() as connection:
        write_model_points(connection, "run", [points[0]._replace(step=9), points[0]._replace(model_id="m-none")])
    assert len(tracking.logged_models.details(model).metrics) == 2


def test_run_lists_its_input_and_output_models(tracking: Tracking) -> None:
    read, made = (tracking.logged_models.create(0).model.id for _ in range(2))
    tracking.inputs.log("run", [], [read])
    for step in (1, 7):
        tracking.logged_models.log_outputs("run", {made: step})
    models = tracking.run_search.get(tracking.runs.get("run")).models
    assert models == [RunModel(read, "input", 0), RunModel(made, "output", 7)]
    with pytest.raises(HanzoError, match="'model_id' exceeds"):
        tracking.logged_models.log_outputs("run", {made: 9, "m" * 257: 1})
    assert tracking.run_search.get(tracking.runs.get("run")).models == models
    # An unknown model may belong to another tracking server.
    tracking.inputs.log("run", [], ["m-elsewhere"])
    assert tracking.run_search.get(tracking.runs.get("run")).models == [*models, RunModel("m-elsewhere", "input", 0)]
    tracking.runs.delete("run")
    with pytest.raises(HanzoError, match="must be in the 'active' state"):
        tracking.logged_models.log_outputs("run", {made: 9})


def test_inputs_and_outputs_of_a_run_keep_their_logging_order(tracking: Tracking) -> None:
    names, models = "cabd", [tracking.logged_models.create(0).model.id for _ in range(4)]
    models.sort(reverse=True)
    described = {name: DatasetInput(Dataset(name, "1", "local", "here"), {}) for name in names}
    tracking.runs.create(0, run_id="other")
    tracking.inputs.log("other", [described[name] for name in "dcba"])
    tracking.inputs.log("run", [described["c"], described["a"], described["c"]], models[:1])
    tracking.inputs.log("run", [described["a"], described["b"], described["d"]])
    tracking.logged_models.log_outputs("run", {models[1]: 5, models[2]: 5})
    tracking.logged_models.log_outputs("run", {models[3]: 1, models[1]: 7})
    found = tracking.run_search.get(tracking.runs.get("run"))
    assert "".join(used.dataset.name for used in found.inputs) == names
    assert [(model.model_id, model.step) for model in found.models] == [
        (models[0], 0),
        (models[1], 7),
        (models[2], 5),
        (models[3], 1),
    ]


def test_models_are_found_by_filter_and_order(tracking: Tracking, database: Database) -> None:
    ids = {
        name: tracking.logged_models.create(0, name=name, source_run_id="run", params={"p": name}, tags={"t": "x"}).model.id
        for name in "abcd"
    }
    tracking.logged_models.finalize(ids["b"], "ready")
    points = [
        metric_point("acc", 0.9, 3, 1, "", ids["a"], "test", "1"),
        metric_point("acc", 0.2, 2, 2, "", ids["a"], "train", "1"),
        metric_point("acc", 0.5, 1, 1, "", ids["b"], "test", "2"),
        metric_point("acc", math.nan, 1, 1, "", ids["c"], "test", "2"),
    ]
    with database.write() as connection:
        write_model_points(connection, "run", points)
    assert sorted(found(tracking)) == ["a", "b", "c", "d"]
    assert found(tracking, "name = 'a'") == "a"
    assert found(tracking, "status = 'ready'") == "b"
    assert sorted(found(tracking, "params.p IN ('a', 'b') AND tags.t LIKE 'x%'")) == ["a", "b"]
    assert found(tracking, "metrics.acc > 0.8") == "a"
    assert found(tracking, "metrics.acc > 0.8", MeasuredOn("train")) == ""
    assert sorted(found(tracking, "", MeasuredOn("test"))) == ["a", "b", "c"]
    assert sorted(found(tracking, "", MeasuredOn("test", "2"))) == ["b", "c"]
    # The newest point of a is that on train; NaN comes after numbers, missing values after NaN.
    assert found(tracking, orders=(ModelOrder("metrics.acc"),)) == "abcd"
    assert found(tracking, orders=(ModelOrder("metrics.acc", ascending=False),)) == "bacd"
    assert found(tracking, orders=(ModelOrder("metrics.acc", True, MeasuredOn("test")),)) == "bacd"
    assert found(tracking, orders=(ModelOrder("metrics.acc", True, MeasuredOn(digest="1")),)).startswith("a")
    assert found(tracking, orders=(ModelOrder("metrics.acc", True, MeasuredOn(digest="2")),)).startswith("bc")
    assert found(tracking, orders=(ModelOrder("name", ascending=False),)) == "dcba"
    tracking.logged_models.delete(ids["d"])
    assert "d" not in found(tracking)


@pytest.mark.parametrize(
    ("order", "message"),
    [("nothing", "Invalid order by field name: nothing"), ("params.p", "Only metrics are supported")],
)
def test_invalid_model_order_is_refused(tracking: Tracking, order: str, message: str) -> None:
    with pytest.raises(HanzoError, match=message):
        found(tracking, orders=(ModelOrder(order),))


def test_a_token_of_another_search_is_refused(tracking: Tracking) -> None:
    for _ in range(2):
        tracking.logged_models.create(0)
    search = tracking.logged_model_search.search
    token = search([0], limit=1).next_page_token
    with pytest.raises(HanzoError, match=r"^Experiment IDs in the page token do not match"):
        search([0, 1], limit=1, page_token=token)
    conditions = parse_filter("name = 'm'", LOGGED_MODEL_GRAMMAR)
    with pytest.raises(HanzoError, match=r"^Filter string in the page token does not match"):
        search([0], conditions=conditions, limit=1, page_token=token)
    # This order has a page token position of another length.
    with pytest.raises(HanzoError, match=r"^Order by in the page token does not match"):
        search([0], orders=[ModelOrder("metrics.acc")], limit=1, page_token=token)
    with pytest.raises(HanzoError, match=r"^Invalid page token"):
        search([0], datasets=[MeasuredOn("d")], limit=1, page_token=token)
    of_runs = Keyset([SortKey(logged_models.c.id, True, str)]).next_token([("a",), ("b",)], 1)
    for foreign in (of_runs, encode_token([]), encode_token([1, 2, 3, 4, 5])):
        with pytest.raises(HanzoError, match="page token"):
            search([0], limit=1, page_token=foreign)


def test_model_history_appends_to_its_tag(tracking: Tracking) -> None:
    for number in range(2):
        tracking.model_history.append("run", {"artifact_path": f"m{number}"})
    assert tracking.run_data.tags("run")["mlflow.log-model.history"] == '[{"artifact_path": "m0"}, {"artifact_path": "m1"}]'
    tracking.run_data.set_tag("run", "mlflow.log-model.history", "mine")
    with pytest.raises(HanzoError, match="is not a list of models"):
        tracking.model_history.append("run", {})


def test_dataset_input_keeps_its_first_logged_description(tracking: Tracking) -> None:
    tracking.runs.create(0, run_id="other")
    dataset = Dataset("d", "1", "local", "here", schema="{}")
    again = DatasetInput(Dataset("d", "1", "s3", "there"), {"z": "2"})
    tracking.inputs.log("run", [DatasetInput(dataset, {"z": "1", "mlflow.data.context": "train"}), again])
    tracking.inputs.log("run", [again])
    tracking.inputs.log("other", [DatasetInput(dataset, {})])
    assert tracking.run_search.get(tracking.runs.get("run")).inputs == [
        DatasetInput(dataset, {"z": "1", "mlflow.data.context": "train"})
    ]
    summaries = tracking.inputs.summaries([0], "default")
    assert sorted(summary.context or "" for summary in summaries) == ["", "train"]
    assert tracking.inputs.summaries([0], "another") == []
    for text, count in (
        ("datasets.name = 'd'", 2),
        ("dataset.digest != '1'", 0),
        ("datasets.context ILIKE 'TR%'", 1),
        ("datasets.context IN ('train', 'eval') AND datasets.name LIKE 'd'", 1),
        ("datasets.context != 'train'", 0),
    ):
        page = tracking.run_search.search([0], conditions=parse_filter(text, RUN_GRAMMAR))
        assert len(page.runs) == count, text
    with pytest.raises(HanzoError, match="'digest' exceeds the maximum length of 36"):
        tracking.inputs.log("run", [DatasetInput(Dataset("d", "1" * 37, "", ""), {})])


def test_deleting_and_restoring_an_experiment_includes_its_runs(tracking: Tracking, database: Database) -> None:
    experiment = tracking.experiments.create("cascade", "default")
    for name in ("kept", "gone"):
        tracking.runs.create(experiment.id, run_id=name)
    tracking.runs.delete("gone")
    tracking.experiments.delete(experiment.id)
    with pytest.raises(HanzoError, match="must be in the 'active' state"):
        tracking.run_data.log_param("kept", "a", "1")
    tracking.experiments.restore(experiment.id)
    assert {name: tracking.runs.get(name).lifecycle_stage for name in ("kept", "gone")} == {
        "kept": "active",
        "gone": "active",
    }
    assert tracking.runs.get("run").lifecycle_stage == "active"
    with database.read() as connection:
        types = [event.type for event in read_after(connection, 0) if event.type.startswith("experiment.")]
    assert types == ["experiment.deleted", "experiment.restored"]
