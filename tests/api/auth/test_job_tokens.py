"""A job's own token reaches its run and that run's outputs only."""

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from resources.jobs import job_tokens
from resources.metadata.database import Database
from tests.api.auth.conftest import MLFLOW, Organization, SignedIn, made
from tests.support.api.job_client import PROXY, Job

POINT = {"key": "loss", "value": 0.5, "timestamp": 1}


@pytest.fixture(scope="module")
def database(signed_in: SignedIn) -> Iterator[Database]:
    database = Database(signed_in.server.settings.database_url)
    yield database
    database.close()


@pytest.fixture(scope="module")
def job(signed_in: SignedIn, database: Database) -> Job:
    return Job(signed_in, database)


def test_job_token_logs_everything_to_its_own_run(job: Job) -> None:
    run = job.id
    made(job.post("/runs/log-metric", run_id=run, **POINT))
    made(job.post("/runs/log-metric", run_uuid=run, **POINT, step="1"))
    made(job.post("/runs/log-batch", run_id=run, metrics=[POINT], params=[{"key": "p", "value": "v"}], tags=[]))
    made(job.post("/runs/log-parameter", run_id=run, key="q", value="v"))
    made(job.post("/runs/set-tag", run_id=run, key="t", value="v"))
    made(job.post("/runs/log-inputs", run_id=run, datasets=[]))
    made(job.http.get(f"{MLFLOW}/runs/get", params={"run_id": run}))
    place = f"{PROXY}/{job.experiment}/{run}/artifacts/a.txt"
    made(job.http.put(place, content=b"a"))
    assert job.http.get(place).content == b"a"
    logged = made(job.post("/logged-models", experiment_id=job.experiment, name="m", source_run_id=run))
    model = logged["model"]["info"]["model_id"]
    made(job.http.put(f"{PROXY}/{job.experiment}/models/{model}/artifacts/w.bin", content=b"w"))
    made(job.http.patch(f"{MLFLOW}/logged-models/{model}", json={"model_id": model, "status": "LOGGED_MODEL_READY"}))
    made(job.post("/runs/outputs", run_id=run, models=[{"model_id": model, "step": 0}]))


def test_job_token_gets_501_for_traces_like_any_caller(job: Job) -> None:
    for path in ("/v1/traces", "/api/3.0/mlflow/traces"):
        answer = job.http.post(path, content=b"\xff no JSON", headers={"Content-Type": "application/x-protobuf"})
        assert (answer.status_code, answer.json()["error_code"]) == (501, "NOT_IMPLEMENTED")
    assert job.http.get(f"{MLFLOW}/webhooks").status_code == 501


def test_job_token_creates_and_logs_to_child_runs(job: Job) -> None:
    below = {"experiment_id": job.experiment, "tags": [{"key": "mlflow.parentRunId", "value": job.id}]}
    child = made(job.post("/runs/create", **below))["run"]["info"]
    assert child["user_id"] == "researcher@acme"
    made(job.post("/runs/log-metric", run_id=child["run_id"], **POINT))
    tags = [{"key": "mlflow.parentRunId", "value": child["run_id"]}]
    grandchild = made(job.post("/runs/create", experiment_id=job.experiment, tags=tags))["run"]["info"]["run_id"]
    made(job.post("/runs/update", run_id=grandchild, status="FINISHED"))


def test_job_token_reads_its_dataset_and_model(signed_in: SignedIn, job: Job) -> None:
    dataset = signed_in.acme.ids["dataset"]
    assert job.http.get(f"/v1/datasets/{dataset}/preview").status_code == 200
    made(signed_in.acme.admin.post("/v1/models", json={"name": "tokens"}))
    made(job.http.get(f"{MLFLOW}/registered-models/get", params={"name": "tokens"}))


def others(organization: Organization, job: Job) -> list[tuple[str, str, dict[str, Any]]]:
    ids = organization.ids
    run, experiment = ids["run"], ids["experiment"]
    tagged = {"tags": [{"key": "mlflow.parentRunId", "value": run}]}
    return [
        ("POST", f"{MLFLOW}/runs/log-metric", {"json": {"run_id": run, **POINT}}),
        ("POST", f"{MLFLOW}/runs/log-metric", {"json": {"run_id": job.id, "run_uuid": run, **POINT}}),
        ("POST", f"{MLFLOW}/runs/log-batch", {"json": {"run_id": run, "metrics": [POINT]}}),
        ("POST", f"{MLFLOW}/runs/set-tag", {"json": {"run_id": run, "key": "k", "value": "v"}}),
        ("POST", f"{MLFLOW}/runs/create", {"json": {"experiment_id": job.experiment, **tagged}}),
        ("POST", f"{MLFLOW}/logged-models", {"json": {"experiment_id": experiment, "name": "m", "source_run_id": job.id}}),
        ("POST", f"{MLFLOW}/logged-models", {"json": {"experiment_id": job.experiment, "source_run_id": run}}),
        ("PATCH", f"{MLFLOW}/logged-models/{ids['logged_model']}", {"json": {"status": "LOGGED_MODEL_READY"}}),
        ("GET", f"{MLFLOW}/runs/get", {"params": {"run_id": run}}),
        ("GET", f"{MLFLOW}/experiments/get", {"params": {"experiment_id": experiment}}),
        ("PUT", f"{PROXY}/{experiment}/{run}/artifacts/x", {"content": b"x"}),
        ("PUT", f"{PROXY}/{job.experiment}/{run}/artifacts/x", {"content": b"x"}),
        ("GET", f"{PROXY}/{ids['file']}", {}),
        ("GET", f"/v1/models/{ids['model']}/versions", {}),
        ("GET", f"/v1/runs/{run}", {}),
    ]


@pytest.mark.parametrize("number", range(15))
@pytest.mark.parametrize("whose", ["its own organization's", "another organization's"])
def test_objects_of_other_jobs_and_organizations_are_not_found(
    signed_in: SignedIn, job: Job, number: int, whose: str
) -> None:
    organization = signed_in.acme if whose.startswith("its") else signed_in.rival
    method, path, options = others(organization, job)[number]
    answer = job.http.request(method, path, **options)
    assert (answer.status_code, answer.json()["error_code"]) == (404, "RESOURCE_DOES_NOT_EXIST"), answer.text


def test_dataset_not_used_by_the_job_is_not_found(signed_in: SignedIn, job: Job) -> None:
    files = {"files": ("b.jsonl", b'{"instruction": "2+2", "answer": "4"}\n' * 4, "application/jsonl")}
    other = made(signed_in.acme.admin.post("/v1/datasets", data={"name": "secret"}, files=files))["id"]
    for dataset in (other, signed_in.rival.ids["dataset"]):
        assert job.http.get(f"/v1/datasets/{dataset}/preview").status_code == 404


def test_creating_a_run_without_parent_is_refused(job: Job) -> None:
    answer = job.post("/runs/create", experiment_id=job.experiment)
    assert answer.status_code == 403 and "mlflow.parentRunId" in answer.json()["message"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("PUT", "{proxy}/place/{other}/artifacts/f"),
        ("GET", "{proxy}/place/{other}/artifacts/f"),
        ("GET", "{proxy}?path=place/{other}"),
        ("PUT", "{proxy}/{experiment}"),
        ("POST", "/api/2.0/mlflow-artifacts/mpu/create/place/{other}"),
        ("POST", "/api/2.0/mlflow-artifacts/mpu/create/{experiment}"),
    ],
)
def test_own_run_id_parameter_grants_no_access_to_other_artifact_paths(
    signed_in: SignedIn, job: Job, method: str, path: str
) -> None:
    where = path.format(proxy=PROXY, other=signed_in.acme.ids["run"], experiment=job.experiment)
    options: dict[str, Any] = {"PUT": {"content": b"f"}, "POST": {"json": {"path": "f", "num_parts": 1}}}.get(method, {})
    answer = job.http.request(method, f"{where}{'&' if '?' in where else '?'}run_id={job.id}", **options)
    assert (answer.status_code, answer.json()["error_code"]) == (403, "PERMISSION_DENIED"), answer.text


def test_creating_a_run_with_a_chosen_id_is_refused(job: Job) -> None:
    answer = job.post("/runs/create", experiment_id=job.experiment, run_id=job.id)
    assert answer.status_code == 403 and "mlflow.parentRunId" in answer.json()["message"]


def test_job_calls_are_audited_as_the_submitting_user_with_role_job(signed_in: SignedIn, job: Job) -> None:
    made(job.post("/runs/update", run_id=job.id, run_name="n"))
    params = {"user": "researcher@acme", "limit": 1000}
    calls = signed_in.acme.admin.get("/v1/audit", params=params).raise_for_status().json()["events"]
    assert ["job"] in [call["payload"]["roles"] for call in calls if f"run:{job.id}" in call["payload"]["objects"]]


def test_role_named_job_from_iam_grants_nothing(signed_in: SignedIn) -> None:
    with signed_in.client("mallory", "acme", "job") as http:
        assert http.get("/v1/runs").status_code == 403


@pytest.mark.slow
@pytest.mark.parametrize("end", ["revoked", "restarted"])
def test_revoked_or_expired_job_token_is_rejected(signed_in: SignedIn, database: Database, end: str) -> None:
    ended = Job(signed_in, database)
    made(ended.post("/runs/log-metric", run_id=ended.id, **POINT))
    with database.write() as connection:
        job_tokens.revoke_token(connection, ended.id) if end == "revoked" else job_tokens.issue_token(
            connection, ended.id, 60
        )
    deadline = time.monotonic() + 60
    while (answer := ended.post("/runs/log-metric", run_id=ended.id, **POINT)).status_code == 200:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert (answer.status_code, answer.json()["error_code"]) == (401, "UNAUTHENTICATED")


def test_job_token_never_issued_is_rejected(signed_in: SignedIn) -> None:
    for token in (job_tokens.TOKEN_PREFIX, job_tokens.TOKEN_PREFIX + "x" * 43, job_tokens.TOKEN_PREFIX + "'; --"):
        answer = httpx.get(f"{signed_in.server.url}/version", headers={"Authorization": f"Bearer {token}"}, trust_env=False)
        assert answer.status_code == 401
