"""Another organization's objects are invisible on every route, in every spelling."""

import re

import pytest
from fastapi import FastAPI

from api.auth.route_matching import Routes, shape
from tests.api.auth.conftest import Organization, SignedIn, made
from tests.api.auth.role_matrix import WHO_MAY
from tests.resources.hpo.sweep_files import small
from tests.support.api.route_requests import (
    NOBODYS,
    POINT,
    REMOVALS,
    REQUESTS,
    M,
    Request,
    filled,
    first_of_its_mirrors,
    json,
    query,
    without_names,
)

pytestmark = pytest.mark.requirement("W5")

NAME_NOTHING = re.compile(
    r" (/api/[23]\.0)?/?mlflow/((experiments|runs|logged-models|registered-models|model-versions)/search|server-info"
    r"|experiments/(get-by-name|search-datasets|create)|registered-models/create|gateway-proxy|ui-telemetry|\{\})$"
    r"| /v1/(addresses|audit|dataset-files|datasets|datasets/raw|datasets/trace)$"
    r"| /v1/(events|experiments|heartbeats|hpo|jobs|models|traces)$"
    r"| /(alive|ready|health|version|login|logout|docs.*|redoc|openapi.json|graphql|first_visit.js|static-files/.*)?$"
    r"| /v1/jobs/\{\}/programs/| /v1/engine/| /dagster(/\{\})?$"
)
"""Routes without an object in the request: probes, pages, creation, lists and searches; and those of pods, which refuse
every signed-in user (tests/api/routes/v1/test_job_objects.py). Dagster knows no organizations: its UI is closed to all but
administrators where there are several (tests/api/dagster_ui)."""
RECIPE = "smollm2-135m-lora"
NAME_IN_THEIR_OWN_WAY = {
    "GET /v1/features/{}/{}",
    "POST /v1/features/{}/transform",
    "POST /v1/jobs/estimate",
    "POST /v1/models/{}/versions",
    "POST /v1/models/register",
    "POST /v1/pipelines/runs",
    "POST /api/2.0/mlflow/model-versions/create",
    "POST /api/2.0/mlflow/registered-models/rename",
}
"""Their model may be new; what else they name is covered below."""
MAY_FAIL = {
    f"{M}/experiments/delete-experiment-tag",
    "/v1/runs/{run}/replay",
    "/v1/runs/compare",
    "/v1/models/{model}/versions/1/stage",
    "/v1/models/{model}/versions/1/data",
    "/v1/models/{model}/versions/1/proof",
    "/v1/datasets/{dataset}",
    "/v1/datasets/{dataset}/report",
    "/model-versions/get-artifact",
    "/api/2.0/mlflow-artifacts/artifacts/models/{model}/1/notes.txt",
    f"{M}/logged-models/{{logged_model}}/artifacts/files",
    f"{M}/runs/log-model",
    f"{M}/artifacts/presigned-download-url",
    f"{M}/artifacts/presigned-upload-url",
    "/api/2.0/mlflow-artifacts/presigned/{file}",
    "/api/2.0/mlflow-artifacts/mpu/create/{experiment}/{run}/artifacts",
    "/api/2.0/mlflow-artifacts/mpu/complete/{experiment}/{run}/artifacts",
    "/api/2.0/mlflow-artifacts/mpu/abort/{experiment}/{run}/artifacts",
}
"""The owner's own call may fail, but not because the object is missing."""


@pytest.fixture(scope="module")
def spare(signed_in: SignedIn) -> dict[str, str]:
    """Return the ids of acme's objects.

    Model and logged model are used by no other test.
    """
    admin, ids = signed_in.acme.admin, signed_in.acme.ids
    made(admin.post(f"{M}/registered-models/create", json={"name": "spare", "tags": [{"key": "k", "value": "v"}]}))
    source = f"s3://hanzo-ml/runs/{ids['run']}/artifacts/notes.txt"
    tagged = {"name": "spare", "source": source, "run_id": ids["run"], "tags": [{"key": "k", "value": "v"}]}
    made(admin.post(f"{M}/model-versions/create", json=tagged))
    logged = {"experiment_id": ids["experiment"], "name": "spare", "tags": [{"key": "a", "value": "b"}]}
    model = made(admin.post(f"{M}/logged-models", json=logged))["model"]
    return {**ids, "model": "spare", "logged_model": model["info"]["model_id"]}


def test_every_route_naming_an_object_is_covered(app: FastAPI) -> None:
    """The mirrors below another prefix are the same endpoints behind the same authorization."""
    routes = Routes(app)
    tried = set(NAME_IN_THEIR_OWN_WAY)
    for method, path, _ in [*REQUESTS, *REMOVALS]:
        match = routes.match(method, without_names(path))
        assert match is not None, path
        tried.add(first_of_its_mirrors(match.route.shape))
    shapes = {first_of_its_mirrors(route.shape) for route in routes.all if route.method != "HEAD"}
    assert {shape for shape in shapes - tried if not NAME_NOTHING.search(shape)} == set()


@pytest.mark.parametrize("request_", [*REQUESTS, *REMOVALS], ids=lambda asked: f"{asked[0]} {asked[1]} {sorted(asked[2])}")
def test_object_of_another_organization_looks_nonexistent(
    signed_in: SignedIn, spare: dict[str, str], request_: Request
) -> None:
    acme, rival = signed_in.acme, signed_in.rival
    its = spare if request_ in REMOVALS else acme.ids

    def send(by: Organization, ids: dict[str, str]) -> tuple[int, str]:
        method, path, options = request_
        answer = by.admin.request(method, filled(path, ids), **{name: filled(value, ids) for name, value in options.items()})
        text = answer.text
        for name, identifier in sorted(ids.items(), key=lambda item: -len(item[1])):
            text = text.replace(identifier, f"<{name}>")
        return answer.status_code, text

    foreign = send(rival, its)
    assert foreign[0] == 404 and "RESOURCE_DOES_NOT_EXIST" in foreign[1], foreign
    assert foreign == send(rival, NOBODYS), "it tells that the object exists"
    own = send(acme, its)
    assert own[0] < 300 or (request_[1] in MAY_FAIL and own != foreign and own[0] != 403), own


def test_runs_of_the_own_organization_can_be_compared(signed_in: SignedIn) -> None:
    acme = signed_in.acme
    body = {"experiment_id": acme.ids["experiment"]}
    ids = [acme.ids["run"], acme.researcher.post("/v1/runs", json=body).json()["id"]]
    for asked_for in (",".join(ids), ids):
        found = acme.viewer.get("/v1/runs/compare", params={"ids": asked_for}).json()
        assert [run["id"] for run in found["runs"]] == ids


def test_request_mixing_own_and_foreign_objects_is_refused_as_a_whole(signed_in: SignedIn) -> None:
    acme, rival = signed_in.acme, signed_in.rival
    params = {"run_ids": [rival.ids["run"], acme.ids["run"]], "metric_key": "loss"}
    assert rival.admin.get(f"{M}/metrics/get-history-bulk-interval", params=params).status_code == 404
    for ids in (",".join(params["run_ids"]), params["run_ids"]):
        assert rival.admin.get("/v1/runs/compare", params={"ids": ids}).status_code == 404
        assert acme.viewer.get("/v1/runs/compare", params={"ids": ids}).status_code == 404
    for path in ("log-metric", "set-tag", "update"):
        both = {"run_id": rival.ids["run"], "run_uuid": acme.ids["run"], **POINT, "key": "mixed", "status": "FAILED"}
        rival.admin.post(f"{M}/runs/{path}", json=both)
        swapped = {**both, "run_id": acme.ids["run"], "run_uuid": rival.ids["run"]}
        assert rival.admin.post(f"{M}/runs/{path}", json=swapped).status_code == 404
    run = acme.admin.get(f"/v1/runs/{acme.ids['run']}").json()
    assert run["status"] != "failed" and "mixed" not in str(run)
    linked = {"run_id": rival.ids["run"], "models": [{"model_id": acme.ids["logged_model"], "step": 0}]}
    for path in ("outputs", "log-inputs"):
        foreign = rival.admin.post(f"{M}/runs/{path}", json=linked)
        assert foreign.status_code == 404
        # Without sign-in a call for a missing object is audited; here that would reveal which ids belong to others.
        nobodys = rival.admin.post(f"{M}/runs/{path}", json={**linked, "models": [{"model_id": "m-none", "step": 0}]})
        assert nobodys.json()["message"] == foreign.json()["message"].replace(acme.ids["logged_model"], "m-none")


def test_camel_case_field_names_do_not_bypass_the_organization_check(signed_in: SignedIn) -> None:
    """Protobuf's JSON also accepts `runId` for `run_id`: its object is looked up too."""
    acme, rival = signed_in.acme, signed_in.rival
    foreign = acme.ids
    bodies = {
        "runs/create": {"experimentId": foreign["experiment"]},
        "runs/update": {"runId": foreign["run"], "status": "FAILED"},
        "runs/set-tag": {"runId": foreign["run"], "key": "mixed", "value": "1"},
        "runs/log-metric": {"runUuid": foreign["run"], **POINT},
        "runs/log-batch": {"run_id": rival.ids["run"], "metrics": [{**POINT, "modelId": foreign["logged_model"]}]},
        "runs/outputs": {"run_id": rival.ids["run"], "models": [{"modelId": foreign["logged_model"], "step": 0}]},
    }
    for path, body in bodies.items():
        answer = rival.admin.post(f"{M}/{path}", json=body)
        assert (answer.status_code, answer.json()["error_code"]) == (404, "RESOURCE_DOES_NOT_EXIST"), path
        both = {**body, "run_id": rival.ids["run"], "experiment_id": rival.ids["experiment"]}
        assert rival.admin.post(f"{M}/{path}", json=both).status_code in (400, 404), path
    run = acme.admin.get(f"/v1/runs/{foreign['run']}").json()
    assert run["status"] != "failed" and "mixed" not in str(run)


def test_secondary_object_of_another_organization_is_not_found(signed_in: SignedIn) -> None:
    acme, rival = signed_in.acme.ids, signed_in.rival.ids
    source = f"s3://hanzo-ml/runs/{acme['run']}/artifacts/notes.txt"
    job = {"name": "j", "dataset": acme["dataset"]}
    requests: list[Request] = [
        query(f"/v1/datasets/{rival['dataset']}/diff", against=acme["dataset"]),
        json("/v1/jobs", **job),
        json("/v1/pipelines/runs", pipeline_id="j", config={"data_source": acme["dataset"], "model_type": RECIPE}),
        json("/v1/jobs/estimate", **job),
        json("/v1/hpo", **small(base_config={"dataset": acme["dataset"], "recipe": RECIPE, "max_steps": 4})),
        json(f"/v1/models/{rival['model']}/versions", run_id=acme["run"], artifact="notes.txt"),
        json("/v1/models/register", name=rival["model"], version="9", artifact_uri=source, metrics={}, stage="none"),
        json(f"{M}/registered-models/rename", name=acme["model"], new_name="taken over"),
    ]
    for method, path, options in requests:
        answer = signed_in.rival.admin.request(method, path, **options)
        assert answer.status_code == 404, (path, answer.text)


def test_record_trace_and_download_link_stay_within_an_organization(signed_in: SignedIn) -> None:
    acme, rival = signed_in.acme, signed_in.rival
    asked_for = {"match": "1+1"}
    for answer in (
        rival.admin.post("/v1/datasets/trace", json=asked_for),
        rival.admin.get("/v1/datasets/trace", params=asked_for),
    ):
        assert answer.is_success and acme.ids["dataset"] not in answer.text and "@acme" not in answer.text, answer.text
    assert "corpus" in acme.admin.post("/v1/datasets/trace", json=asked_for).text
    link = str(made(acme.admin.get(f"/v1/datasets/{acme.ids['dataset']}/download"))["url"])
    assert acme.admin.get(link).status_code == 200
    for changed in (link.replace("organization=acme", "organization=rival"), link.replace("%40acme", "%40rival")):
        assert changed != link and rival.admin.get(changed).status_code == 403


def test_model_name_used_by_another_organization_is_available(signed_in: SignedIn) -> None:
    """Neither organization can detect that the other has a model of that name."""
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
    made(rival.admin.post(f"{M}/registered-models/create", json={"name": name}))
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
def test_model_version_from_another_organizations_files_is_refused(signed_in: SignedIn, source: str) -> None:
    acme, rival = signed_in.acme, signed_in.rival
    body = {"name": rival.ids["model"], "source": filled(source, acme.ids)}
    assert rival.admin.post(f"{M}/model-versions/create", json=body).status_code == 404
    assert len(rival.admin.get(f"/v1/models/{rival.ids['model']}/versions").json()["versions"]) == 1


def test_searches_and_lists_return_only_objects_of_the_own_organization(signed_in: SignedIn) -> None:
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


def test_graphql_returns_only_objects_of_the_own_organization(signed_in: SignedIn) -> None:
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


@pytest.mark.requirement("F7")
def test_experiment_0_maps_to_a_separate_experiment_for_each_organization(signed_in: SignedIn) -> None:
    """A script that names no experiment runs unmodified, and runs of two organizations stay apart."""
    numbers = []
    for organization in (signed_in.acme, signed_in.rival):
        created = [
            organization.researcher.post(f"{M}/runs/create", json=body).json()["run"]["info"]
            for body in ({"experiment_id": "0"}, {}, {"experiment_id": "00"}, {"experimentId": "0"})
        ]
        [number] = {info["experiment_id"] for info in created}
        numbers.append(number)
        got = organization.viewer.get(f"{M}/experiments/get", params={"experiment_id": "0"}).json()["experiment"]
        assert (got["experiment_id"], got["name"]) == (number, "Default")
        found = organization.viewer.post(f"{M}/runs/search", json={"experiment_ids": ["0"]}).json()["runs"]
        assert {run["info"]["run_id"] for run in found} >= {info["run_id"] for info in created}
        assert {info["user_id"] for info in created} == {f"researcher@{organization.name}"}
    assert len({*numbers, "0"}) == 3


def test_researcher_cannot_register_a_model_directly_into_production(signed_in: SignedIn) -> None:
    acme = signed_in.acme
    source = f"s3://hanzo-ml/runs/{acme.ids['run']}/artifacts/notes.txt"
    body = {"name": "straight", "version": "1", "artifact_uri": source, "metrics": {}, "stage": "production"}
    assert acme.researcher.post("/api/v1/models/register", json=body).status_code == 403
    assert acme.researcher.post("/api/v1/models/register", json={**body, "stage": "none"}).status_code < 300


@pytest.mark.parametrize("body", [b"{", b'{"run_id": NaN}', '{"run_id": "x"}'.encode("utf-16"), b"[" * 5000])
def test_malformed_body_is_refused_with_400(signed_in: SignedIn, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    answer = signed_in.acme.admin.post(f"{M}/runs/update", content=body, headers=headers)
    assert (answer.status_code, answer.json()["error_code"]) == (400, "INVALID_PARAMETER_VALUE")


ANOTHERS_JOB = ("/v1/jobs/{job}/cancel", "/v1/jobs/{job}/resume")
"""`test_routes` covers a researcher's own jobs."""
TAKEN_BEFORE = f"{M}/registered-models/alias"
"""An earlier request removed the alias."""


@pytest.mark.parametrize(
    "request_",
    [request for request in REQUESTS if request[1] not in ANOTHERS_JOB],
    ids=lambda asked: f"{asked[0]} {asked[1]} {sorted(asked[2])}",
)
def test_permitted_request_succeeds_for_every_permitted_role(signed_in: SignedIn, app: FastAPI, request_: Request) -> None:
    """Guards against hiding a researcher's own objects: testing refusals alone missed that."""
    method, path, options = request_
    match = Routes(app).match(method, without_names(path))
    assert match is not None
    letters = next(letters for route, letters in WHO_MAY if shape(route) == first_of_its_mirrors(match.route.shape))
    acme = signed_in.acme
    for letter, who in (("r", acme.researcher), ("v", acme.viewer)):
        if letter in letters:
            filled_in = {name: filled(value, acme.ids) for name, value in options.items()}
            status = who.request(method, filled(path, acme.ids), **filled_in).status_code
            assert status < 300 or (path in {*MAY_FAIL, TAKEN_BEFORE} and status not in (401, 403)), (letter, status)
