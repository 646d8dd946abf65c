"""MLflow's web UI on our store, in a real browser: it shows logged data, read-only."""

import math
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi.testclient import TestClient
from graphql import build_schema, find_breaking_changes, parse
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, Metric, Param
from mlflow.server.graphql.graphql_schema_extensions import schema as mlflow_schema

from api.routes.ui.graphql_execution import exceeded_limit, schema
from api.routes.ui.static_files import build_folder
from resources.metadata.database import Database
from resources.metadata.tracking.run_search import RunSearch
from tests.support.browser_page import page
from tests.support.server_process import ServerProcess

STEPS = 40


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("ui")) as process:
        yield process


@pytest.fixture(scope="module")
def experiment(server: ServerProcess, runs: list[str]) -> str:
    return str(MlflowClient(server.url).get_run(runs[0]).info.experiment_id)


@pytest.fixture(scope="module")
def runs(server: ServerProcess) -> list[str]:
    client = MlflowClient(server.url)
    experiment = client.create_experiment("harbour lights")
    made = []
    for number in range(2):
        run = client.create_run(experiment, run_name=f"lantern-{number}")
        points = [Metric("train/loss", math.exp(-step / 10), step, step) for step in range(STEPS)]
        client.log_batch(run.info.run_id, metrics=points, params=[Param("lora_rank", f"{8 * (number + 1)}")])
        client.log_text(run.info.run_id, "all is well", "log/watch.txt")
        client.set_terminated(run.info.run_id)
        made.append(run.info.run_id)
    return made


@pytest.mark.slow
def test_the_experiments_and_their_runs_are_listed(server: ServerProcess, experiment: str) -> None:
    page(f"{server.url}/#/experiments", "harbour lights")
    shown = page(f"{server.url}/#/experiments/{experiment}/runs", "lantern-0", "lantern-1", "matching runs")
    assert "ENDPOINT_NOT_FOUND" not in shown


@pytest.mark.requirement("F5")
@pytest.mark.slow
def test_a_run_shows_its_params_metrics_and_charts(server: ServerProcess, experiment: str, runs: list[str]) -> None:
    run = f"{server.url}/#/experiments/{experiment}/runs/{runs[1]}"
    page(run, "lantern-1", "lora_rank", "16", "train/loss", "Finished")
    page(f"{run}/model-metrics", "js-line")  # plotly's class of a line that it has drawn


@pytest.mark.slow
def test_runs_are_compared(server: ServerProcess, experiment: str, runs: list[str]) -> None:
    query = f'runs=["{runs[0]}","{runs[1]}"]&experiments=["{experiment}"]'.replace('"', "%22")
    page(f"{server.url}/#/compare-runs?{query}", "lantern-0", "lantern-1", "lora_rank", "train/loss")


@pytest.mark.slow
def test_registered_models_and_their_versions_are_shown(server: ServerProcess, runs: list[str]) -> None:
    client = MlflowClient(server.url)
    client.create_registered_model("lighthouse", description="keeps the harbour")
    source = f"{client.get_run(runs[0]).info.artifact_uri}/log"
    client.create_model_version("lighthouse", source, run_id=runs[0])
    client.set_registered_model_alias("lighthouse", "beacon", "1")
    file = {"name": "lighthouse", "version": "1", "path": "watch.txt"}
    assert httpx.get(f"{server.url}/model-versions/get-artifact", params=file).text == "all is well"
    assert httpx.get(f"{server.url}/model-versions/get-artifact", params=file | {"path": "../x"}).status_code == 400
    page(f"{server.url}/#/models", "lighthouse")
    page(f"{server.url}/#/models/lighthouse", "beacon")
    page(f"{server.url}/#/models/lighthouse/versions/1", "Version 1", "lantern-0")


def test_page_forbids_foreign_scripts_and_framing(server: ServerProcess) -> None:
    headers = httpx.get(server.url).headers
    policy = headers["content-security-policy"]
    assert headers["x-frame-options"] == "SAMEORIGIN", "as MLflow's answers: the policy is stricter, and comes first"
    assert "default-src 'self'" in policy and "frame-ancestors 'none'" in policy


@pytest.mark.parametrize("path", ["../../../handlers.py", "%2e%2e/%2e%2e/handlers.py", "/etc/passwd", "static", "nothing"])
def test_static_file_path_traversal_is_not_found(server: ServerProcess, path: str) -> None:
    assert httpx.get(f"{server.url}/static-files/{path}").status_code == 404


@pytest.mark.requirement("F5")
@pytest.mark.parametrize("header", [{"Origin": ""}, {"Sec-Fetch-Site": "same-origin"}])
def test_a_page_reads_and_never_writes(server: ServerProcess, runs: list[str], header: dict[str, str]) -> None:
    header = {name: value or server.url for name, value in header.items()}
    with httpx.Client(base_url=server.url, headers=header) as browser:
        assert browser.post("/ajax-api/2.0/mlflow/runs/search", json={"experiment_ids": ["1"]}).status_code == 200
        refused = browser.post("/ajax-api/2.0/mlflow/runs/delete", json={"run_id": runs[0]})
        assert refused.status_code == 403
        assert "read-only" in refused.json()["message"]
        assert browser.request("DELETE", "/api/2.0/mlflow/logged-models/m-1").status_code == 403
    assert MlflowClient(server.url).get_run(runs[0]).info.lifecycle_stage == "active"


GET_RUN = """query GetRun($data: MlflowGetRunInput!) @component(name: "MLflow") { mlflowGetRun(input: $data) {
  apiError { code } run { info { runName startTime } data { metrics { key value step } } } } }"""


def ask(server: ServerProcess, query: str, **variables: object) -> httpx.Response:
    return httpx.post(f"{server.url}/graphql", json={"query": query, "variables": variables})


def test_graphql_answers_with_the_run(server: ServerProcess, runs: list[str]) -> None:
    run = ask(server, GET_RUN, data={"runId": runs[0]}).json()["data"]["mlflowGetRun"]["run"]
    assert run["info"]["runName"] == "lantern-0"
    assert isinstance(run["info"]["startTime"], str)
    assert run["data"]["metrics"] == [{"key": "train/loss", "value": math.exp(-(STEPS - 1) / 10), "step": str(STEPS - 1)}]


HISTORY = """query Q($data: MlflowGetMetricHistoryBulkIntervalInput!) {
  mlflowGetMetricHistoryBulkInterval(input: $data) { metrics { runId step value timestamp } apiError { message } } }"""


def test_graphql_answers_with_a_sampled_history(server: ServerProcess, runs: list[str]) -> None:
    given = {"runIds": runs, "metricKey": "train/loss", "startStep": 10, "endStep": 19, "maxResults": 5}
    found = ask(server, HISTORY, data=given).json()["data"]["mlflowGetMetricHistoryBulkInterval"]["metrics"]
    for run in runs:
        steps = [int(point["step"]) for point in found if point["runId"] == run]
        assert len(steps) == 5 and steps[0] == 10 and steps[-1] == 19


def test_graphql_names_the_missing_run_and_refuses_invalid_documents(server: ServerProcess) -> None:
    missing = ask(server, GET_RUN, data={"runId": "nobody"}).json()
    assert missing == {"data": {"mlflowGetRun": None}, "errors": ["Run with id=nobody not found"]}
    assert ask(server, "query {").status_code == 400
    assert ask(server, "query { " + "mlflowGetRun { run { info { runName } } } " * 600 + "}").status_code == 400
    assert "Cannot query field" in ask(server, "query { secrets }").json()["errors"][0]
    assert ask(server, "mutation { deleteRun }").json()["data"] is None


INFO = "query {{ mlflowGetRun {{ run {{ info {{ {} }} }} }} }}"
RUN_NAME = "mlflowGetRun { run { info { runName } } } "


def aliased(first: str, count: int) -> str:
    return " ".join(f"{first}{number}: runId" for number in range(count))


@pytest.mark.parametrize(
    ("document", "refusal"),
    [
        (INFO.format(aliased("a", 10)), None),
        (f"query {{ {RUN_NAME * 10} }}", None),
        (f"query {{ ...A ...A }} fragment A on Query {{ {RUN_NAME * 10} }}", None),
        (f"query {{ {RUN_NAME * 11} }}", "at most 10 root fields, got 11"),
        (f"query {{ ...A {RUN_NAME} }} fragment A on Query {{ {RUN_NAME * 10} }}", "at most 10 root fields, got 11"),
        (INFO.format(aliased("a", 11)), "at most 10 aliases, got 11"),
        (
            INFO.format(f"... on MlflowRunInfo {{ {aliased('a', 6)} }} ...B")
            + f" fragment B on MlflowRunInfo {{ {aliased('b', 6)} }}",
            "at most 10 aliases, got 12",
        ),
        (INFO.format("runId " * 1000), "maximum total selections of 1000"),
        ("query { " + "a { " * 11 + "a" + " }" * 12, "maximum depth of 10"),
        ("query { ...A } fragment A on Query { mlflowGetRun { ...A } }", "maximum depth of 10"),
    ],
)
def test_graphql_document_above_its_limits_is_refused(document: str, refusal: str | None) -> None:
    found = exceeded_limit(parse(document))
    assert (found is None) if refusal is None else refusal in str(found)


def test_graphql_limit_refusal_is_a_graphql_error_with_status_200(server: ServerProcess) -> None:
    refused = ask(
        server, "query { " + " ".join(f"a{i}: mlflowGetRun {{ run {{ info {{ runId }} }} }}" for i in range(11)) + "}"
    )
    assert (refused.status_code, refused.json()["data"]) == (200, None)
    assert "at most 10 root fields" in refused.json()["errors"][0]


def test_graphql_schema_is_compatible_with_mlflows() -> None:
    assert find_breaking_changes(build_schema(str(mlflow_schema)), schema()) == []


SEARCH = """mutation M($given: MlflowSearchRunsInput) @component(name: "MLflow") {
  mlflowSearchRuns(input: $given) { runs { info { runId lifecycleStage status } } nextPageToken } }"""


def test_graphql_search_filters_runs_by_view_type(server: ServerProcess) -> None:
    client = MlflowClient(server.url)
    experiment = client.create_experiment("low tide")
    kept, gone = (client.create_run(experiment).info.run_id for _ in range(2))
    client.delete_run(gone)
    for view, found in ((None, {kept}), ("ACTIVE_ONLY", {kept}), ("DELETED_ONLY", {gone}), ("ALL", {kept, gone})):
        given = {"experimentIds": [experiment], "runViewType": view}
        runs = ask(server, SEARCH, given=given).json()["data"]["mlflowSearchRuns"]["runs"]
        assert {run["info"]["runId"] for run in runs} == found, view
    asked = f'experimentIds: ["{experiment}"], runViewType: ALL'
    literal = f"{{ mlflowSearchRuns(input: {{{asked}}}) {{ runs {{ info {{ runId }} }} }} }}"
    assert len(ask(server, literal).json()["data"]["mlflowSearchRuns"]["runs"]) == 2
    assert "NONE" in ask(server, SEARCH, given={"runViewType": "NONE"}).json()["errors"][0]
    page = ask(server, SEARCH, given={"experimentIds": [experiment], "runViewType": "ALL", "maxResults": 1}).json()
    assert len(page["data"]["mlflowSearchRuns"]["runs"]) == 1 and page["data"]["mlflowSearchRuns"]["nextPageToken"]


@pytest.mark.parametrize("asked", [0, -1, -3])
def test_graphql_page_size_below_one_is_refused(server: ServerProcess, runs: list[str], experiment: str, asked: int) -> None:
    answers = (
        ask(server, SEARCH, given={"experimentIds": [experiment], "maxResults": asked}).json(),
        ask(server, HISTORY, data={"runIds": runs, "metricKey": "train/loss", "maxResults": asked}).json(),
        ask(server, VERSIONS, given={"maxResults": str(asked)}).json(),
    )
    for answer in answers:
        assert list(answer["data"].values()) == [None]
        assert answer["errors"] == [
            f"Invalid value '{asked}' for parameter 'max_results' supplied. It must be a positive integer."
        ]


VERSIONS = """query Q($given: MlflowSearchModelVersionsInput) {
  mlflowSearchModelVersions(input: $given) { modelVersions { name version status aliases tags { key value } } nextPageToken }
}"""


def test_graphql_finds_model_versions(server: ServerProcess, runs: list[str]) -> None:
    client = MlflowClient(server.url)
    client.create_registered_model("buoy")
    for _ in range(2):
        client.create_model_version("buoy", f"runs:/{runs[0]}/log", run_id=runs[0], tags={"sea": "north"})
    client.set_registered_model_alias("buoy", "beacon", "2")
    given = {"filter": "name = 'buoy'", "orderBy": ["version_number DESC"], "maxResults": 1}
    found = ask(server, VERSIONS, given=given).json()["data"]["mlflowSearchModelVersions"]
    tags = [{"key": "sea", "value": "north"}]
    beacon = {"name": "buoy", "version": "2", "status": "READY", "aliases": ["beacon"], "tags": tags}
    assert found["modelVersions"] == [beacon]
    rest = ask(server, VERSIONS, given={**given, "pageToken": found["nextPageToken"]}).json()
    assert rest["data"]["mlflowSearchModelVersions"]["modelVersions"][0]["version"] == "1"


def test_graphql_test_query_and_mutation_echo_their_input_by_post_and_get(server: ServerProcess) -> None:
    for document, name in (('{ test(inputString: "ahoy") { output } }', "test"), (ECHO, "testMutation")):
        assert ask(server, document).json() == {"data": {name: {"output": "ahoy"}}, "errors": None}
    asked = httpx.request("GET", f"{server.url}/graphql", json={"query": '{ test(inputString: "ahoy") { output } }'})
    assert asked.json() == {"data": {"test": {"output": "ahoy"}}, "errors": None}
    assert httpx.get(f"{server.url}/graphql").status_code == 400


ECHO = 'mutation M @component(name: "MLflow") { testMutation(inputString: "ahoy") { output } }'


@pytest.mark.parametrize(
    ("table", "said"),
    [("params", "The metadata database is unavailable: try again later"), ("event", "Unexpected error in the server")],
)
def test_graphql_error_reveals_no_internals(
    breakable: TestClient, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, table: str, said: str
) -> None:
    made = breakable.post("/api/2.0/mlflow/runs/create", json={"experiment_id": "0"}).json()["run"]["info"]["run_id"]
    if table == "params":
        with Database(breakable.app.state.settings.database_url).write() as connection:  # type: ignore[attr-defined]
            connection.exec_driver_sql("DROP TABLE params")
    else:
        monkeypatch.setattr(RunSearch, "get", lambda *_: {}["/srv/secret"])
    answer = breakable.post("/graphql", json={"query": GET_RUN, "variables": {"data": {"runId": made}}})
    assert (answer.status_code, answer.json()["data"]) == (200, {"mlflowGetRun": None})
    [error] = answer.json()["errors"]
    assert error.startswith(said) and "SELECT" not in error and "secret" not in error
    assert "params" in caplog.text or "/srv/secret" in caplog.text


def test_a_link_of_the_page_downloads_the_file(server: ServerProcess, runs: list[str]) -> None:
    answer = httpx.get(f"{server.url}/get-artifact", params={"run_id": runs[0], "path": "log/watch.txt"})
    assert answer.text == "all is well"
    assert "attachment" in answer.headers["content-disposition"]


def test_first_visit_script_sends_no_requests() -> None:
    script = (Path(__file__).parents[4] / "api" / "routes" / "ui" / "first_visit.js").read_text()
    assert "fetch(" not in script and "http" not in script


def test_graphql_lists_files_and_finds_runs_and_datasets(server: ServerProcess, experiment: str, runs: list[str]) -> None:
    listed = ask(
        server,
        "query Q($run: String!) { mlflowListArtifacts(input: {runId: $run}) { files { path isDir fileSize } } }",
        run=runs[0],
    )
    assert listed.json()["data"]["mlflowListArtifacts"]["files"] == [{"path": "log", "isDir": True, "fileSize": "0"}]
    document = "mutation M($ids: [String]) { mlflowSearchRuns(input: {experimentIds: $ids}) { runs { info { runId } } } }"
    found = ask(server, document, ids=[experiment]).json()["data"]["mlflowSearchRuns"]["runs"]
    assert {run["info"]["runId"] for run in found} == set(runs)
    used = DatasetInput(Dataset("tides", "d1", "local", "{}"), [])
    MlflowClient(server.url).log_inputs(runs[0], [used])
    document = """mutation M($ids: [String]) { mlflowSearchDatasets(input: {experimentIds: $ids}) {
      datasetSummaries { name context } apiError { code } } }"""
    summaries = ask(server, document, ids=[experiment]).json()["data"]["mlflowSearchDatasets"]
    assert summaries == {"datasetSummaries": [{"name": "tides", "context": ""}], "apiError": None}
    refused = ask(server, document, ids=[]).json()
    assert refused["data"]["mlflowSearchDatasets"] is None
    assert "at least one experiment_id" in refused["errors"][0]


def test_version_artifact_link_downloads_the_file_for_every_source_kind(server: ServerProcess, runs: list[str]) -> None:
    client = MlflowClient(server.url)
    client.create_registered_model("tide-table")
    places = (
        f"runs:/{runs[0]}/log",
        f"mlflow-artifacts:/{client.get_run(runs[0]).info.experiment_id}/{runs[0]}/artifacts/log",
        f"s3://hanzo-ml/runs/{runs[0]}/artifacts/log",
        "models:/tide-table/3",
    )
    for number, place in enumerate(places, start=1):
        client.create_model_version("tide-table", place, run_id=None if place.startswith("models:") else runs[0])
        query = {"name": "tide-table", "version": str(number), "path": "watch.txt"}
        answer = httpx.get(f"{server.url}/model-versions/get-artifact", params=query)
        assert (answer.status_code, answer.text) == (200, "all is well"), place
        assert answer.headers["content-disposition"] == "attachment; filename=watch.txt"
        missing = httpx.get(f"{server.url}/model-versions/get-artifact", params={**query, "path": "other.txt"})
        assert missing.json()["error_code"] == "RESOURCE_DOES_NOT_EXIST"
    nowhere = httpx.get(f"{server.url}/model-versions/get-artifact", params={"name": "x", "version": "1", "path": "../a"})
    assert nowhere.json() == {"error_code": "INVALID_PARAMETER_VALUE", "message": "Invalid path"}


def test_the_page_opens_without_its_notice_of_telemetry() -> None:
    """The notice said that usage is sent to MLflow's makers.

    Its keys are those that the installed build reads.
    """
    script = (Path(__file__).parents[4] / "api" / "routes" / "ui" / "first_visit.js").read_text()
    folder = build_folder()
    assert folder is not None
    build = "".join(file.read_text() for file in folder.glob("static/js/main*.js"))
    for key in ("mlflow.telemetry.info.alert.dismissed", "mlflow.settings.telemetry.enabled"):
        assert f'"{key}_v1"' in script and f'"{key}"' in build
