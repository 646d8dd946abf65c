"""/v1/experiments and /v1/runs."""

import hashlib
import re
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from recipes.checkpoints.retention import VALIDATION_LOSS_KEY
from recipes.storage.artifact_store import Store
from resources.metadata.database import Database
from resources.settings.settings import Settings
from tests.support.metered_gpus import meter_attempt


@pytest.fixture
def run_id(http: TestClient) -> str:
    return str(http.post("/v1/runs", json={"experiment_name": "finance"}).json()["id"])


@pytest.mark.requirement("E6", "E11")
def test_experiment_is_created_listed_and_unique_by_name(http: TestClient) -> None:
    made = http.post("/v1/experiments", json={"name": "finance", "description": "qa", "owner": "ada"})
    assert made.status_code == 201
    experiment = made.json()
    assert (experiment["name"], experiment["description"], experiment["owner"]) == ("finance", "qa", "ada")
    assert http.get(f"/v1/experiments/{experiment['id']}").json() == experiment
    assert [found["name"] for found in http.get("/v1/experiments").json()["experiments"]] == ["finance", "Default"]
    assert http.post("/v1/experiments", json={"name": "finance"}).json()["error_code"] == "RESOURCE_ALREADY_EXISTS"


@pytest.mark.requirement("E10")
def test_an_experiment_sums_the_gpu_hours_of_its_runs(http: TestClient, settings: Settings) -> None:
    database = Database(settings.database_url)
    for experiment, hours in (("dear", 1.5), ("dear", 2.25), ("cheap", 0.5)):
        run = http.post("/v1/runs", json={"experiment_name": experiment}).json()
        metrics = [{"key": "system/total_gpu_hours", "value": 1000}]  # any user can log any number
        assert http.post(f"/v1/runs/{run['id']}/metrics", json={"metrics": metrics}).status_code == 200
        meter_attempt(database, run["id"], hours)
    listed = {found["name"]: found for found in http.get("/v1/experiments").json()["experiments"]}
    assert {name: found["gpu_hours"] for name, found in listed.items()} == {"dear": 3.75, "cheap": 0.5, "Default": 0}
    assert http.get(f"/v1/experiments/{listed['dear']['id']}").json() == listed["dear"]
    assert http.delete(f"/v1/experiments/{listed['dear']['id']}").json()["gpu_hours"] == 3.75


@pytest.mark.requirement("E1", "E7")
def test_run_passes_from_queued_to_completed(http: TestClient) -> None:
    body = {"experiment_name": "finance", "name": "qlora", "status": "queued", "params": {"lora_rank": 64, "lr": 2e-5}}
    made = http.post("/v1/runs", json=body)
    assert made.status_code == 201
    run = made.json()
    assert (run["name"], run["status"], run["params"]) == ("qlora", "queued", {"lora_rank": "64", "lr": "2e-05"})
    for status in ("running", "completed"):
        run = http.patch(f"/v1/runs/{run['id']}/status", json={"status": status}).json()
        assert run["status"] == status
    assert run["ended_at"] >= run["started_at"]
    place = f"mlflow-artifacts:/{run['experiment_id']}/{run['id']}/artifacts"
    assert (run["artifact_uri"], run["organization"]) == (place, "default")
    listed = http.get(f"/v1/experiments/{run['experiment_id']}/runs").json()["runs"]
    assert [found["id"] for found in listed] == [run["id"]]


def test_run_shows_its_user(http: TestClient) -> None:
    made = http.post("/api/2.0/mlflow/runs/create", json={"experiment_id": "0", "user_id": "ada"}).json()["run"]["info"]
    assert http.get(f"/v1/runs/{made['run_id']}").json()["user_id"] == "ada"


@pytest.mark.requirement("F12", "Z22")
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("queued", "SCHEDULED"),
        ("running", "RUNNING"),
        ("completed", "FINISHED"),
        ("failed", "FAILED"),
        ("cancelled", "KILLED"),
    ],
)
def test_run_status_maps_to_mlflow_status_and_back(http: TestClient, run_id: str, ours: str, theirs: str) -> None:
    """In both directions: a status written through one API is read through the other."""

    def said() -> tuple[str, str]:
        found = http.get("/api/2.0/mlflow/runs/get", params={"run_id": run_id}).json()["run"]["info"]["status"]
        return http.get(f"/v1/runs/{run_id}").json()["status"], found

    assert http.patch(f"/v1/runs/{run_id}/status", json={"status": ours}).status_code == 200
    assert said() == (ours, theirs)
    for status in ("RUNNING", theirs):
        assert http.post("/api/2.0/mlflow/runs/update", json={"run_id": run_id, "status": status}).status_code == 200
    assert said() == (ours, theirs)


@pytest.mark.requirement("E6", "G12", "Z7")
def test_run_is_found_only_in_its_own_experiment(http: TestClient, run_id: str) -> None:
    run = http.get(f"/v1/runs/{run_id}").json()
    for prefix in ("/v1", "/api/v1"):
        assert http.get(f"{prefix}/experiments/{run['experiment_id']}/runs/{run_id}").json() == run
    other = http.post("/v1/experiments", json={"name": "another"}).json()["experiment_id"]
    for elsewhere in (f"{other}/runs/{run_id}", f"{run['experiment_id']}/runs/{'0' * 32}", f"404/runs/{run_id}"):
        assert http.get(f"/v1/experiments/{elsewhere}").status_code == 404


def test_deleted_run_and_experiment_are_hidden_until_restored(http: TestClient, run_id: str) -> None:
    experiment = http.get(f"/v1/runs/{run_id}").json()["experiment_id"]

    def listed() -> tuple[list[str], list[str]]:
        found = (
            http.get(f"/v1/experiments/{experiment}/runs").json()["runs"],
            http.get("/v1/experiments").json()["experiments"],
        )
        return [run["id"] for run in found[0]], [item["name"] for item in found[1]]

    assert http.delete(f"/v1/runs/{run_id}").json()["lifecycle_stage"] == "deleted"
    assert listed() == ([], ["finance", "Default"])
    assert http.post(f"/v1/runs/{run_id}/params", json={"params": {"a": 1}}).status_code == 400
    http.post("/api/2.0/mlflow/runs/restore", json={"run_id": run_id})
    assert http.delete(f"/v1/experiments/{experiment}").json()["lifecycle_stage"] == "deleted"
    assert listed() == ([], ["Default"])
    http.post("/api/2.0/mlflow/experiments/restore", json={"experiment_id": experiment})
    assert listed() == ([run_id], ["finance", "Default"])


@pytest.mark.requirement("E3", "E4", "E7")
def test_run_shows_metrics_params_and_artifacts(http: TestClient, settings: Settings, run_id: str, tmp_path: Path) -> None:
    metrics = [
        {"key": "train/loss", "value": 0.5, "step": 1, "timestamp": 10},
        {"key": "train/loss", "value": 0.25, "step": 2, "timestamp": 20},
        {"key": "system/peak_memory_gb", "value": 78.2, "timestamp": 30},
    ]
    assert http.post(f"/v1/runs/{run_id}/metrics", json={"metrics": metrics}).json() == {}
    assert http.post(f"/v1/runs/{run_id}/params", json={"params": {"model": "zen-72b"}}).json() == {}
    uploaded = http.post(f"/v1/runs/{run_id}/artifacts", params={"key": "eval/results.json"}, content=b"{}")
    assert uploaded.json() == {
        "key": "eval/results.json",
        "path": f"s3://hanzo-ml/runs/{run_id}/artifacts/eval/results.json",
        "size": 2,
        "sha256": hashlib.sha256(b"{}").hexdigest(),
    }
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "w").write_text("weights")
    store = Store(settings.store)
    store.publish(tmp_path / "made", f"s3://hanzo-ml/runs/{run_id}/checkpoint-1000", "checkpoint")
    for step, loss in ((1000, 0.5), (500, 0.4), ("from-500/1000", 0.6)):
        place = f"s3://hanzo-ml/checkpoints/{run_id}/{step}"
        store.publish(tmp_path / "made", place, "checkpoint", facts={VALIDATION_LOSS_KEY: loss})
    store.put_bytes(f"s3://hanzo-ml/checkpoints/{run_id}/1500/w", b"on its way: no manifest yet")
    run = http.get(f"/v1/runs/{run_id}").json()
    assert {metric["key"]: (metric["value"], metric["step"]) for metric in run["metrics"]} == {
        "train/loss": (0.25, 2),
        "system/peak_memory_gb": (78.2, 0),
    }
    assert run["params"] == {"model": "zen-72b"}
    assert run["system_metrics"]["peak_memory_gb"] == 78.2
    assert run["system_metrics"]["gpu_type"] is None
    manifest = store.size(f"s3://hanzo-ml/runs/{run_id}/checkpoint-1000/manifest.json")
    kept = 7 + store.size(f"s3://hanzo-ml/checkpoints/{run_id}/500/manifest.json")
    assert run["artifacts"] == [
        {"key": "eval/results.json", "path": f"s3://hanzo-ml/runs/{run_id}/artifacts/eval/results.json", "size": 2},
        {"key": "checkpoint-1000", "path": f"s3://hanzo-ml/runs/{run_id}/checkpoint-1000/", "size": 7 + manifest},
        {"key": "checkpoint/step-500", "path": f"s3://hanzo-ml/checkpoints/{run_id}/500/", "size": kept},
        {"key": "checkpoint/step-1000", "path": f"s3://hanzo-ml/checkpoints/{run_id}/1000/", "size": kept},
        {
            "key": "checkpoint/from-500/step-1000",
            "path": f"s3://hanzo-ml/checkpoints/{run_id}/from-500/1000/",
            "size": kept,
        },
        {"key": "best_model_step_500", "path": f"s3://hanzo-ml/checkpoints/{run_id}/500/", "size": kept},
    ]


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/v1/runs/nobody", None, 404),
        ("GET", "/v1/experiments/77", None, 404),
        ("GET", "/v1/experiments/x", None, 400),
        ("DELETE", "/v1/runs/nobody", None, 404),
        ("DELETE", "/v1/experiments/77", None, 404),
        ("POST", "/v1/runs", {}, 400),
        ("POST", "/v1/runs", {"experiment_id": "0", "experiment_name": "x"}, 400),
        ("POST", "/v1/runs", {"experiment_id": "77"}, 404),
        ("PATCH", "/v1/runs/RUN/status", {"status": "FINISHED"}, 400),
        ("POST", "/v1/runs/RUN/metrics", {"metrics": [{"key": "a", "value": "x"}]}, 400),
        ("POST", "/v1/runs/RUN/artifacts?key=../x", None, 400),
        ("POST", "/v1/runs/RUN/artifacts", None, 400),
    ],
)
def test_invalid_request_is_refused_with_code_and_message(
    http: TestClient, run_id: str, method: str, path: str, body: object, status: int
) -> None:
    answer = http.request(method, path.replace("RUN", run_id), json=body)
    assert (answer.status_code, set(answer.json())) == (status, {"error_code", "message"})


@pytest.mark.parametrize(
    ("query", "fields", "key", "content"),
    [
        ({"key": "eval/h.txt"}, {}, "eval/h.txt", b"hello\r\n--"),
        ({}, {"key": "eval/h.txt"}, "eval/h.txt", b"larger than what is kept in memory" * 100_000),
        ({}, {}, "mine.txt", b""),
        ({"key": "a"}, {"key": "b"}, "a", b"x"),
    ],
    ids=["key in the query", "key in the form", "the file's own name", "key in both"],
)
def test_artifact_sent_as_form_stores_the_contained_file(
    http: TestClient, run_id: str, query: dict[str, str], fields: dict[str, str], key: str, content: bytes
) -> None:
    """`curl -F file=@h.txt` stored the form around the file and its checksum, with 201."""
    sent = http.post(
        f"/v1/runs/{run_id}/artifacts", params=query, data=fields, files={"file": ("mine.txt", content, "text/plain")}
    )
    assert sent.status_code == 201, sent.text
    assert sent.json() == {
        "key": key,
        "path": f"s3://hanzo-ml/runs/{run_id}/artifacts/{key}",
        "size": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    assert http.get("/get-artifact", params={"run_id": run_id, "path": key}).content == content


BOUNDARY = {"content-type": "multipart/form-data; boundary=x"}
PART = b'--x\r\ncontent-disposition: form-data; name="file"; filename="%s"\r\n\r\nhello'


@pytest.mark.parametrize(
    ("body", "headers", "says"),
    [
        (b'--x\r\ncontent-disposition: form-data; name="file"\r\n\r\nhello\r\n--x--\r\n', {}, "no file in this form"),
        (PART % b"a" + b"\r\n" + PART % b"b" + b"\r\n--x--\r\n", {}, "Maximum number of files is 1"),
        (PART % b"" + b"\r\n--x--\r\n", {}, r"with its name as \?key=NAME"),
        (PART % b"../a" + b"\r\n--x--\r\n", {}, "Invalid path"),
        (PART % b"a", {}, "no file in this form"),
        (b"no form at all", {}, "Invalid multipart data"),
        (PART % b"a" + b"\r\n--x--\r\n", {"x-checksum-sha256": "0" * 64}, "do not match X-Checksum-Sha256"),
    ],
    ids=["a field", "two files", "no name", "a name that climbs", "cut off", "not a form", "not what was promised"],
)
def test_malformed_artifact_form_is_refused_with_a_hint_and_stores_nothing(
    http: TestClient, run_id: str, body: bytes, headers: dict[str, str], says: str
) -> None:
    answer = http.post(f"/v1/runs/{run_id}/artifacts", content=body, headers={**BOUNDARY, **headers})
    assert answer.status_code == 400 and re.search(says, answer.json()["message"]), answer.text
    assert http.get(f"/v1/runs/{run_id}").json()["artifacts"] == []


def test_checksum_header_of_an_artifact_form_applies_to_the_contained_file(http: TestClient, run_id: str) -> None:
    headers = {"x-checksum-sha256": hashlib.sha256(b"hello").hexdigest()}
    sent = http.post(f"/v1/runs/{run_id}/artifacts", headers=headers, files={"file": ("a", b"hello")})
    assert (sent.status_code, sent.json()["size"]) == (201, 5), sent.text


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("experiments", {"name": "  "}),
        ("runs", {"experiment_name": "  "}),
        ("runs", {"experiment_name": "x", "name": "\t"}),
        ("jobs", {"name": "x", "model": "  "}),
    ],
)
def test_blank_name_is_refused(http: TestClient, path: str, named: dict[str, str]) -> None:
    """It was an empty cell in the lists."""
    answer = http.post(f"/v1/{path}", json=named)
    key = [*named][-1]
    assert (answer.status_code, answer.json()["message"]) == (
        400,
        f"'{key}': it is blank: use at least one visible character",
    )
    assert [found["name"] for found in http.get("/v1/experiments").json()["experiments"]] == ["Default"]


def test_a_refused_run_leaves_no_experiment(http: TestClient) -> None:
    body = {"experiment_name": "new", "params": {"bad//key": 1}}
    assert http.post("/v1/runs", json=body).status_code == 400
    assert [found["name"] for found in http.get("/v1/experiments").json()["experiments"]] == ["Default"]


@pytest.mark.parametrize("asked", ["events?after", "audit?after", "audit?since"])
def test_event_offset_beyond_64_bits_is_refused(http: TestClient, asked: str) -> None:
    assert http.get(f"/v1/{asked}={2**63 - 1}").json()["events"] == []
    assert http.get(f"/v1/{asked}={10**20}").status_code == 400


@pytest.mark.parametrize("path", ["/v1/jobs/estimate", "/v1/hpo"])
def test_lone_surrogate_in_json_body_is_refused(http: TestClient, path: str) -> None:
    body = b'{"name": "\\ud800", "command": ["\\ud800"]}'
    answer = http.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400 and "\\ud800" not in answer.text
