"""Another organization's objects do not exist, by whichever route and in whichever words they are asked for (row W5)."""

from typing import Any

import pytest

from tests.api.auth.conftest import MLFLOW, Organization, SignedIn

Request = tuple[str, str, dict[str, Any]]


def asked(method: str, path: str, **options: Any) -> Request:
    return method, path, options


def json(path: str, method: str = "POST", /, **body: Any) -> Request:
    return method, path, {"json": body}


def query(path: str, /, **params: Any) -> Request:
    return "GET", path, {"params": params}


M = MLFLOW
POINT = {"key": "k", "value": 1.0, "timestamp": 1}
REQUESTS: list[Request] = [
    query(f"{M}/experiments/get", experiment_id="{experiment}"),
    json(f"{M}/experiments/set-experiment-tag", experiment_id="{experiment}", key="k", value="v"),
    json(f"{M}/experiments/delete-experiment-tag", experiment_id="{experiment}", key="k"),
    json(f"{M}/experiments/update", experiment_id="{experiment}", new_name="shared name"),
    json(f"{M}/runs/create", experiment_id="{experiment}"),
    query(f"{M}/runs/get", run_id="{run}"),
    query(f"{M}/runs/get", run_uuid="{run}"),
    query("/ajax-api/2.0/mlflow/runs/get", run_id="{run}"),
    json(f"{M}/runs/update", run_id="{run}", run_name="n"),
    json(f"{M}/runs/log-metric", run_id="{run}", **POINT),
    json(f"{M}/runs/log-metric", run_uuid="{run}", **POINT),
    json(f"{M}/runs/log-metric", run_id="{run}", key="k", value=1.0, timestamp=1, step="1"),
    json(f"{M}/runs/log-parameter", run_id="{run}", key="p", value="v"),
    json(f"{M}/runs/log-parameter", run_uuid="{run}", key="p", value="v"),
    json(f"{M}/runs/log-batch", run_id="{run}", metrics=[POINT], params=[{"key": "q", "value": "v"}], tags=[]),
    json(f"{M}/runs/log-batch", run_uuid="{run}", metrics=[POINT]),
    json(f"{M}/runs/set-tag", run_id="{run}", key="t", value="v"),
    json(f"{M}/runs/set-tag", run_uuid="{run}", key="t", value="v"),
    json(f"{M}/runs/delete-tag", run_id="{run}", key="t"),
    json(f"{M}/runs/log-inputs", run_id="{run}", datasets=[]),
    json(f"{M}/runs/outputs", run_id="{run}", models=[{"model_id": "{logged_model}", "step": 1}]),
    query(f"{M}/artifacts/list", run_id="{run}"),
    query(f"{M}/metrics/get-history", run_id="{run}", metric_key="loss"),
    query(f"{M}/metrics/get-history-bulk-interval", run_ids=["{run}"], metric_key="loss"),
    query("/get-artifact", run_uuid="{run}", path="notes.txt"),
    query("/api/2.0/mlflow-artifacts/artifacts", path="{experiment}/{run}/artifacts"),
    asked("GET", "/api/2.0/mlflow-artifacts/artifacts/{file}"),
    asked("PUT", "/api/2.0/mlflow-artifacts/artifacts/{experiment}/{run}/artifacts/new.txt", content=b"x"),
    asked("GET", f"{M}/logged-models/{{logged_model}}"),
    asked("GET", f"{M}/logged-models/{{logged_model}}/artifacts/directories"),
    json(f"{M}/logged-models", experiment_id="{experiment}", name="n"),
    json(f"{M}/logged-models/{{logged_model}}/tags", "PATCH", tags=[{"key": "a", "value": "b"}]),
    json(f"{M}/logged-models/{{logged_model}}", "PATCH", status="LOGGED_MODEL_READY"),
    query(f"{M}/registered-models/get", name="{model}"),
    query(f"{M}/registered-models/get-latest-versions", name="{model}"),
    json(f"{M}/registered-models/get-latest-versions", name="{model}"),
    json(f"{M}/registered-models/update", "PATCH", name="{model}", description="d"),
    json(f"{M}/registered-models/set-tag", name="{model}", key="k", value="v"),
    json(f"{M}/registered-models/alias", name="{model}", alias="champion", version="1"),
    query(f"{M}/registered-models/alias", name="{model}", alias="champion"),
    query(f"{M}/model-versions/get", name="{model}", version="1"),
    query(f"{M}/model-versions/get-download-uri", name="{model}", version="1"),
    json(f"{M}/model-versions/update", "PATCH", name="{model}", version="1", description="d"),
    json(f"{M}/model-versions/set-tag", name="{model}", version="1", key="k", value="v"),
    json(f"{M}/model-versions/transition-stage", name="{model}", version="1", stage="Staging"),
    asked("GET", "/v1/experiments/{experiment}"),
    asked("GET", "/v1/experiments/{experiment}/runs"),
    json("/v1/runs", experiment_id="{experiment}"),
    asked("GET", "/v1/runs/{run}"),
    json("/v1/runs/{run}/metrics", metrics=[{"key": "k", "value": 1}]),
    json("/v1/runs/{run}/params", params={"other": "v"}),
    asked("POST", "/v1/runs/{run}/artifacts?key=b.txt", content=b"x"),
    json("/v1/runs/{run}/status", "PATCH", status="running"),
    asked("GET", "/v1/datasets/{dataset}"),
    asked("GET", "/v1/datasets/{dataset}/preview"),
    asked("GET", "/v1/datasets/{dataset}/checks"),
    asked("POST", "/v1/datasets/{dataset}/checks"),
    asked("GET", "/v1/jobs/{job}"),
    asked("GET", "/v1/jobs/{job}/logs?follow=false"),
    asked("GET", "/v1/models/{model}/versions"),
    asked("GET", "/v1/models/{model}/versions/1"),
    json("/v1/models/{model}/versions/1/stage", "PATCH", stage="production"),
    asked("DELETE", "/v1/models/{model}/deployment"),
    json("/v1/models/{model}/versions/1/stage", "PATCH", stage="staging"),
    asked("DELETE", "/api/2.0/mlflow-artifacts/artifacts/{experiment}/{run}/artifacts/new.txt"),
    json(f"{M}/registered-models/alias", "DELETE", name="{model}", alias="champion"),
    asked("POST", "/v1/jobs/{job}/cancel"),
    json(f"{M}/runs/delete", run_id="{run}"),
    json(f"{M}/runs/restore", run_id="{run}"),
    json(f"{M}/experiments/delete", experiment_id="{experiment}"),
    json(f"{M}/experiments/restore", experiment_id="{experiment}"),
]
MAY_FAIL = {
    f"{M}/experiments/delete-experiment-tag",
    "/v1/models/{model}/versions/1/stage",
}
"""The owner's own call is told more than that the object is there, but not that it is missing."""


def filled(value: Any, ids: dict[str, str]) -> Any:
    if isinstance(value, str):
        for name, text in ids.items():
            value = value.replace(f"{{{name}}}", text)
        return value
    if isinstance(value, dict):
        return {key: filled(each, ids) for key, each in value.items()}
    return [filled(each, ids) for each in value] if isinstance(value, list) else value


NOBODYS = {
    "experiment": "999999",
    "run": "0" * 32,
    "file": f"999999/{'0' * 32}/artifacts/notes.txt",
    "logged_model": "m-" + "0" * 32,
    "model": "no-such-model",
    "dataset": "no-such-dataset",
    "job": "no-such-job",
}


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: f"{request[0]} {request[1]} {sorted(request[2])}")
def test_another_organizations_object_is_not_there(signed_in: SignedIn, request_: Request) -> None:
    acme, rival = signed_in.acme, signed_in.rival

    def send(by: Organization, ids: dict[str, str]) -> tuple[int, str]:
        method, path, options = request_
        answer = by.admin.request(method, filled(path, ids), **{name: filled(value, ids) for name, value in options.items()})
        text = answer.text
        for name, identifier in sorted(ids.items(), key=lambda item: -len(item[1])):
            text = text.replace(identifier, f"<{name}>")
        return answer.status_code, text

    foreign = send(rival, acme.ids)
    assert foreign[0] == 404 and "RESOURCE_DOES_NOT_EXIST" in foreign[1], foreign
    assert foreign == send(rival, NOBODYS), "it tells that the object exists"
    own = send(acme, acme.ids)
    assert own[0] < 300 or (request_[1] in MAY_FAIL and "<" not in own[1] and own[0] != 403), own


def test_a_mixed_request_is_refused_as_a_whole(signed_in: SignedIn) -> None:
    acme, rival = signed_in.acme, signed_in.rival
    params = {"run_ids": [rival.ids["run"], acme.ids["run"]], "metric_key": "loss"}
    assert rival.admin.get(f"{M}/metrics/get-history-bulk-interval", params=params).status_code == 404
    for path in ("log-metric", "set-tag", "update"):
        both = {"run_id": rival.ids["run"], "run_uuid": acme.ids["run"], **POINT, "key": "mixed", "status": "FAILED"}
        rival.admin.post(f"{M}/runs/{path}", json=both)
        swapped = {**both, "run_id": acme.ids["run"], "run_uuid": rival.ids["run"]}
        assert rival.admin.post(f"{M}/runs/{path}", json=swapped).status_code == 404
    run = acme.admin.get(f"/v1/runs/{acme.ids['run']}").json()
    assert run["status"] != "failed" and "mixed" not in str(run)
    linked = {"run_id": rival.ids["run"], "models": [{"model_id": acme.ids["logged_model"], "step": 0}]}
    assert rival.admin.post(f"{M}/runs/outputs", json=linked).status_code == 404


def test_a_name_that_another_organization_uses_is_free(signed_in: SignedIn) -> None:
    """Neither is in the other's way, and neither can tell that the other has a model of that name."""
    acme, rival = signed_in.acme, signed_in.rival
    name = "a name of both"
    first = {"name": name, "source": f"s3://hanzo-ml/runs/{acme.ids['run']}/artifacts/notes.txt", "run_id": acme.ids["run"]}
    assert acme.admin.post(f"{M}/registered-models/create", json={"name": name}).status_code == 200
    assert acme.admin.post(f"{M}/model-versions/create", json=first).status_code == 200

    def seen(organization: Organization) -> str:
        asked = [
            organization.admin.get("/v1/models"),
            organization.admin.get(f"/v1/models/{name}/versions"),
            organization.admin.get(f"{M}/registered-models/get", params={"name": name}),
            organization.admin.get(f"{M}/model-versions/search", params={"filter": f"name = '{name}'"}),
        ]
        return "".join(answer.raise_for_status().text for answer in asked)

    before = seen(acme)
    made = rival.admin.post(f"{M}/registered-models/create", json={"name": name})
    assert made.status_code == 200, made.text
    source = f"s3://hanzo-ml/runs/{rival.ids['run']}/artifacts/notes.txt"
    body = {"name": name, "source": source, "run_id": rival.ids["run"]}
    for number in ("1", "2"):
        version = rival.admin.post(f"{M}/model-versions/create", json=body).json()["model_version"]
        assert version["version"] == number
    path = f"/v1/models/{name}/versions"
    assert rival.admin.patch(f"{path}/1/stage", json={"stage": "production"}).status_code == 200
    assert rival.admin.post(f"{M}/registered-models/alias", json={"name": name, "alias": "a", "version": "1"}).is_success
    assert rival.admin.post("/v1/jobs", json={"name": name, "dataset": "corpus"}).status_code == 201
    assert seen(acme) == before
    assert "rival" not in before and acme.ids["run"] not in seen(rival)
    assert acme.admin.get(f"{path}/2").status_code == 404
    assert rival.admin.delete(f"/v1/models/{name}/deployment").status_code == 202
    assert rival.admin.request("DELETE", f"{M}/registered-models/delete", json={"name": name}).status_code == 200
    assert seen(acme) == before


@pytest.mark.parametrize(
    "source",
    [
        "s3://hanzo-ml/runs/{run}/artifacts/notes.txt",
        "s3://hanzo-ml/checkpoints/{run}/1",
        "s3://hanzo-models/{model}/1",
        "s3://hanzo-models/@acme/{model}/v1",
        "s3://hanzo-ml/datasets/@acme/corpus/1",
        "s3://hanzo-ml/datasets/corpus/1",
        "runs:/{run}/notes.txt",
        "models:/{model}/1",
        "models:/{logged_model}",
        "mlflow-artifacts:/{file}",
        "mlflow-artifacts://host/{file}",
    ],
)
def test_a_version_cannot_be_made_of_another_organizations_files(signed_in: SignedIn, source: str) -> None:
    acme, rival = signed_in.acme, signed_in.rival
    body = {"name": rival.ids["model"], "source": filled(source, acme.ids)}
    assert rival.admin.post(f"{M}/model-versions/create", json=body).status_code == 404
    assert len(rival.admin.get(f"/v1/models/{rival.ids['model']}/versions").json()["versions"]) == 1


def test_searches_and_lists_find_only_ones_own(signed_in: SignedIn) -> None:
    acme, rival = signed_in.acme, signed_in.rival
    everything = {"experiment_ids": [acme.ids["experiment"], rival.ids["experiment"]]}
    searches: list[Request] = [
        json(f"{M}/experiments/search", max_results=1000),
        query(f"{M}/experiments/search", max_results=1000),
        query(f"{M}/experiments/get-by-name", experiment_name="shared name"),
        json(f"{M}/runs/search", **everything),
        json(f"{M}/runs/search", **everything, filter="attributes.status = 'RUNNING'"),
        json(f"{M}/logged-models/search", **everything),
        json(f"{M}/experiments/search-datasets", **everything),
        query(f"{M}/registered-models/search"),
        query(f"{M}/model-versions/search"),
        query("/v1/experiments"),
        query("/v1/datasets"),
        query("/v1/jobs"),
        query("/v1/models"),
        query("/v1/events", limit=1000),
    ]
    for method, path, options in searches:
        answer = rival.admin.request(method, path, **options)
        assert answer.status_code == 200, (path, answer.text)
        for name in ("run", "logged_model", "model", "dataset", "job"):
            assert acme.ids[name] not in answer.text, (path, name)
        assert "@acme" not in answer.text, path
    assert rival.ids["experiment"] in rival.admin.get(f"{M}/experiments/search", params={"max_results": 9}).text
    assert rival.ids["run"] in rival.admin.post(f"{M}/runs/search", json=everything).text
    events = rival.admin.get("/v1/events", params={"limit": 1000}).json()["events"]
    assert {"jobs", "models", "datasets"} <= {event["topic"] for event in events}


def test_graphql_finds_only_ones_own(signed_in: SignedIn) -> None:
    acme, rival = signed_in.acme, signed_in.rival
    inline = f'{{ mlflowGetRun(input: {{runId: "{acme.ids["run"]}"}}) {{ run {{ info {{ runName }} }} }} }}'
    experiment = (
        f'{{ mlflowGetExperiment(input: {{experimentId: "{acme.ids["experiment"]}"}}) {{ experiment {{ name }} }} }}'
    )
    runs = (
        f'{{ mlflowSearchRuns(input: {{experimentIds: ["{acme.ids["experiment"]}"]}}) {{ runs {{ info {{ runId }} }} }} }}'
    )
    points = (
        f'{{ mlflowGetMetricHistoryBulkInterval(input: {{runIds: ["{acme.ids["run"]}"], metricKey: "loss"}}) '
        "{ metrics { value } } }"
    )
    for question, own in ((inline, "runName"), (experiment, "shared name"), (runs, acme.ids["run"]), (points, '"value"')):
        assert own in acme.viewer.post("/graphql", json={"query": question}).text, question
        assert own not in rival.viewer.post("/graphql", json={"query": question}).text, question


def test_experiment_0_is_everybodys_own(signed_in: SignedIn) -> None:
    """A script that names no experiment runs unmodified (row F7), and two organizations' runs stay apart."""
    numbers = []
    for organization in (signed_in.acme, signed_in.rival):
        created = [
            organization.researcher.post(f"{M}/runs/create", json=body).json()["run"]["info"]
            for body in ({"experiment_id": "0"}, {}, {"experiment_id": "00"})
        ]
        [number] = {info["experiment_id"] for info in created}
        numbers.append(number)
        got = organization.viewer.get(f"{M}/experiments/get", params={"experiment_id": "0"}).json()["experiment"]
        assert (got["experiment_id"], got["name"]) == (number, "Default")
        found = organization.viewer.post(f"{M}/runs/search", json={"experiment_ids": ["0"]}).json()["runs"]
        assert {run["info"]["run_id"] for run in found} >= {info["run_id"] for info in created}
        assert {info["user_id"] for info in created} == {f"researcher@{organization.name}"}
    assert len({*numbers, "0"}) == 3


def test_a_researcher_does_not_register_into_a_stage(signed_in: SignedIn) -> None:
    acme = signed_in.acme
    source = f"s3://hanzo-ml/runs/{acme.ids['run']}/artifacts/notes.txt"
    body = {"name": "straight", "version": "1", "artifact_uri": source, "metrics": {}, "stage": "production"}
    assert acme.researcher.post("/api/v1/models/register", json=body).status_code == 403
    assert acme.researcher.post("/api/v1/models/register", json={**body, "stage": "none"}).status_code < 300


@pytest.mark.parametrize("body", [b"{", b'{"run_id": NaN}', '{"run_id": "x"}'.encode("utf-16"), b"[" * 5000])
def test_a_body_that_cannot_be_read_names_nothing_and_is_refused(signed_in: SignedIn, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    answer = signed_in.acme.admin.post(f"{M}/runs/update", content=body, headers=headers)
    assert (answer.status_code, answer.json()["error_code"]) == (400, "INVALID_PARAMETER_VALUE")
