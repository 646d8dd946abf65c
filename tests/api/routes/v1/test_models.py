"""/v1/models: stages with both verbs, version pointers with their own numbers, and aliases."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from recipes.storage.artifact_store import Store
from resources.metadata.database import Database
from resources.metadata.jobs import COMMAND, Jobs
from resources.settings.settings import Settings

FILES = "s3://hanzo-models/fraud/v0/weights"


@pytest.fixture
def models(http: TestClient, settings: Settings) -> TestClient:
    Store(settings.store).put_bytes(f"{FILES}/weights.bin", b"w")
    return http


def register(http: TestClient, where: str = "/v1/models/register", **body: Any) -> Any:
    return http.post(where, json={"name": "fraud", "artifact_uri": FILES, **body})


@pytest.mark.requirement("O6", "Z6")
def test_files_are_registered_under_the_callers_version_label(models: TestClient) -> None:
    answer = register(models, "/api/v1/models/register", version="3.1", metrics={"auc": 0.97}, stage="staging")
    made = answer.json()
    assert answer.status_code == 201, made
    assert (made["version"], made["stage"], made["metrics"], made["source"]) == (1, "staging", {"auc": 0.97}, FILES)
    assert made["tags"]["hanzo.version"] == "3.1" and made["created_by"] == "local"
    assert models.get("/v1/models/fraud/versions/3.1").json()["version"] == 1
    assert register(models, version="3.1").json()["error_code"] == "RESOURCE_ALREADY_EXISTS"
    moved = models.put("/api/v1/models/fraud/versions/3.1/stage", json={"stage": "production"}).json()
    assert (moved["version"], moved["stage"]) == (1, "production")
    assert models.get("/v1/models/fraud/versions/3.2").status_code == 400


@pytest.mark.parametrize("uri", ["s3://b/x", "/etc/passwd", "runs:/nobody/model", "s3://hanzo-models/fraud/v0/absent"])
def test_registering_missing_files_is_refused(models: TestClient, uri: str) -> None:
    assert register(models, artifact_uri=uri).status_code == 400
    assert models.get("/v1/models").json() == {"models": []}


def test_registering_with_an_unknown_stage_is_refused(models: TestClient) -> None:
    assert register(models, stage="prod").status_code == 400
    assert models.get("/v1/models").json() == {"models": []}


@pytest.mark.requirement("O2", "O7", "Z5", "Z7")
def test_a_stage_is_set_with_patch_and_with_put(models: TestClient) -> None:
    for _ in range(2):
        register(models)
    stage = "/v1/models/fraud/versions/{}/stage"
    assert models.patch(stage.format(1), json={"stage": "production"}).json()["stage"] == "production"
    assert models.put(stage.format(2), json={"stage": "canary", "traffic_percent": 20}).json()["stage"] == "canary"
    seen = models.get("/api/2.0/mlflow/model-versions/get", params={"name": "fraud", "version": "2"}).json()
    assert seen["model_version"]["current_stage"] == "Staging"
    assert {"key": "hanzo.stage", "value": "canary"} in seen["model_version"]["tags"]
    assert models.put(stage.format(2), json={"stage": "production"}).json()["tags"] == {}
    versions = models.get("/v1/models/fraud/versions").json()["versions"]
    assert {version["version"]: version["stage"] for version in versions} == {1: "archived", 2: "production"}
    assert models.put(stage.format(2), json={"stage": "production", "traffic_percent": 5}).status_code == 400
    assert models.put(stage.format(9), json={"stage": "staging"}).json()["error_code"] == "RESOURCE_DOES_NOT_EXIST"


@pytest.mark.requirement("O2")
def test_models_and_versions_are_listed_a_page_at_a_time(models: TestClient) -> None:
    """One response held all: 3,000 models took a second, growing quadratically."""
    for name in ("c", "a", "b"):
        assert models.post("/v1/models", json={"name": name}).status_code == 201
    models.post("/api/2.0/mlflow/registered-models/set-tag", json={"name": "b", "key": "k", "value": "v"})
    for _ in range(3):
        register(models)
    models.put("/v1/models/fraud/versions/2/stage", json={"stage": "staging"})

    def pages(path: str, key: str, field: str) -> list[list[Any]]:
        found, asked = [], {}
        while True:
            page = models.get(path, params={"limit": 2, **asked}).json()
            found.append([each[field] for each in page[key]])
            if "next_page_token" not in page:
                return found
            asked = {"page_token": page["next_page_token"]}

    assert pages("/v1/models", "models", "name") == [["a", "b"], ["c", "fraud"]]
    assert pages("/v1/models", "models", "tags") == [[{}, {"k": "v"}], [{}, {}]]
    assert pages("/v1/models/fraud/versions", "versions", "version") == [[3, 2], [1]]
    assert pages("/v1/models/fraud/versions", "versions", "stage") == [["none", "staging"], ["none"]]
    assert pages("/v1/models/a/versions", "versions", "version") == [[]]
    of_models = models.get("/v1/models", params={"limit": 1}).json()["next_page_token"]
    of_fraud = models.get("/v1/models/fraud/versions", params={"limit": 1}).json()["next_page_token"]
    for path, token in (("/v1/models/a/versions", of_fraud), ("/v1/models/fraud/versions", of_models), ("/v1/models", "x")):
        refused = models.get(path, params={"page_token": token})
        assert (refused.status_code, refused.json()["error_code"]) == (400, "INVALID_PARAMETER_VALUE")
    assert models.get("/v1/models/nobody/versions").status_code == 404


@pytest.mark.requirement("O3")
def test_mlflow_stage_transition_is_visible_under_v1(models: TestClient) -> None:
    register(models)
    body = {"name": "fraud", "version": "1", "stage": "Archived"}
    assert models.post("/api/2.0/mlflow/model-versions/transition-stage", json=body).status_code == 200
    assert models.get("/v1/models/fraud/versions/1").json()["stage"] == "archived"


@pytest.mark.requirement("O1")
def test_version_shows_params_and_metrics_of_its_run(http: TestClient) -> None:
    def registered(params: dict[str, Any], metrics: dict[str, float]) -> Any:
        run = http.post("/v1/runs", json={"experiment_name": "e", "params": params}).json()["id"]
        points = [{"key": key, "value": value} for key, value in metrics.items()]
        assert http.post(f"/v1/runs/{run}/metrics", json={"metrics": points}).status_code == 200
        http.post(f"/v1/runs/{run}/artifacts", params={"key": "weights"}, content=b"w")
        answer = http.post("/v1/models/m/versions", json={"run_id": run, "artifact": "weights"})
        assert answer.status_code == 201, answer.text
        return answer.json()["training_config"]

    params = {"dataset": "d", "dataset_version": 7, "learning_rate": 2e-5, "max_steps": 5000}
    measured = {"system/total_gpu_hours": 24.5, "system/total_steps": 4000}  # hours that a client logs are ignored
    said = {"dataset": "d", "dataset_version": 7, "learning_rate": 2e-5}
    assert registered(params, measured) == {**said, "total_steps": 4000}
    assert registered(params, {}) == {**said, "total_steps": 5000}, "no hours were measured, and none are claimed"
    assert registered({"dataset_version": "v7"}, {}) == {"dataset_version": "v7"}


def test_version_registered_by_mlflow_shows_data_of_its_run_and_files(http: TestClient) -> None:
    """It showed only the location of its files."""
    params = {
        "base_model": "zenlm/zen-7b",
        "model": "zen-7b",
        "method": "qlora",
        "dataset": "finance",
        "dataset_version": 7,
        "learning_rate": 2e-5,
        "lora_rank": 64,
        "max_steps": 9000,
        "total_steps": 5000,
    }
    run = http.post("/v1/runs", json={"experiment_name": "e", "params": params}).json()["id"]
    points: list[dict[str, Any]] = [
        {"key": "eval/loss", "value": 0.5, "step": 1},
        {"key": "eval/loss", "value": 0.25, "step": 2},
        {"key": "eval/accuracy", "value": "NaN", "step": 2},
        {"key": "system/total_gpu_hours", "value": 24},
    ]
    assert http.post(f"/v1/runs/{run}/metrics", json={"metrics": points}).status_code == 200
    files = {"config.json": b'{"architectures": ["LlamaForCausalLM"]}', "model.safetensors": b"weights", "deep/x": b"x"}
    for name, content in files.items():
        http.post(f"/v1/runs/{run}/artifacts", params={"key": f"final/{name}"}, content=content)
    answer = http.post("/v1/models/m/versions", json={"run_id": run, "artifact": "final"})
    assert answer.status_code == 201, answer.text
    made = answer.json()
    assert (made["architecture"], made["base_model"], made["method"]) == ("LlamaForCausalLM", "zenlm/zen-7b", "qlora")
    assert made["metrics"] == {"eval/loss": 0.25}
    assert made["artifacts"] == {
        "safetensors": {
            "path": f"s3://hanzo-ml/runs/{run}/artifacts/final/model.safetensors",
            "size_bytes": 7,
            "checksum": f"sha256:{hashlib.sha256(b'weights').hexdigest()}",
        }
    }
    said = {
        key: params[key] for key in ("dataset", "dataset_version", "method", "learning_rate", "lora_rank", "total_steps")
    }
    assert made["training_config"] == said
    # It remains a pointer: it waits for no export, and its own claims prove nothing.
    proof = http.get("/v1/models/m/versions/1/proof").json()
    assert (proof["ok"], proof["broken"]) == (
        False,
        ["m version 1 -> artifacts: none was made here, so there is nothing to prove"],
    )
    assert http.put("/v1/models/m/versions/1/stage", json={"stage": "production"}).json()["stage"] == "production"
    assert http.get("/v1/models/m/versions/1/data").status_code == 200
    name = {"name": "m", "version": "1"}
    seen = http.get("/api/2.0/mlflow/model-versions/get", params=name).json()["model_version"]
    assert seen["status"] == "READY"
    got = http.get("/model-versions/get-artifact", params={**name, "path": "model.safetensors"})
    assert (got.status_code, got.content) == (200, b"weights")


MLFLOW = "/api/2.0/mlflow"
PROXY = "/api/2.0/mlflow-artifacts/artifacts"
LOGGED = {
    "MLmodel": b"flavors:\n  python_function: {}\n  transformers: {}\n",
    "model/config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "model/model.safetensors": b"weights",
}


def logged_model(http: TestClient, name: str, files: dict[str, bytes]) -> tuple[str, str]:
    """Create a run with metadata, and a model of it, as MLflow 3's client does.

    Returns the ids of both.
    """
    params = {"base_model": "zenlm/zen-7b", "method": "lora", "learning_rate": 2e-5}
    run = http.post("/v1/runs", json={"experiment_name": "e", "params": params}).json()["id"]
    points = [{"key": "eval/loss", "value": 0.25}, {"key": "system/total_gpu_hours", "value": 3}]
    assert http.post(f"/v1/runs/{run}/metrics", json={"metrics": points}).status_code == 200
    of_run = http.get(f"/v1/runs/{run}").json()["experiment_id"]
    body = {"experiment_id": of_run, "name": name, "source_run_id": run}
    info = http.post(f"{MLFLOW}/logged-models", json=body).json()["model"]["info"]
    root = info["artifact_uri"].removeprefix("mlflow-artifacts:/")
    for path, content in files.items():
        assert http.put(f"{PROXY}/{root}/{path}", content=content).status_code == 200
    return run, info["model_id"]


def pointed(http: TestClient, source: str, **more: str) -> Any:
    """Return what `/v1` shows of a version that MLflow's client registers."""
    http.post(f"{MLFLOW}/registered-models/create", json={"name": "pointed"})
    made = http.post(f"{MLFLOW}/model-versions/create", json={"name": "pointed", "source": source, **more})
    assert made.status_code == 200, made.text
    return http.get(f"/v1/models/pointed/versions/{made.json()['model_version']['version']}").json()


def test_version_of_a_logged_model_shows_data_of_its_run_and_files(http: TestClient) -> None:
    """It showed only the location, under any name."""
    run, model = logged_model(http, "final", LOGGED)
    place = f"s3://hanzo-ml/runs/{model}/artifacts"
    hashes = {path: hashlib.sha256(content).hexdigest() for path, content in LOGGED.items()}
    listed = "".join(f"{sha256}  {path}\n" for path, sha256 in sorted(hashes.items()))
    weights = {
        "path": f"{place}/model/model.safetensors",
        "size_bytes": 7,
        "checksum": f"sha256:{hashes['model/model.safetensors']}",
    }
    folder = {
        "path": f"{place}/",
        "size_bytes": sum(map(len, LOGGED.values())),
        "checksum": f"sha256:{hashlib.sha256(listed.encode()).hexdigest()}",
        "flavors": ["python_function", "transformers"],
    }
    root = http.get(f"{MLFLOW}/logged-models/{model}").json()["model"]["info"]["artifact_uri"]
    ways = [(f"models:/{model}", {"model_id": model}), (f"runs:/{run}/final", {"run_id": run}), (root, {"model_id": model})]
    for source, more in ways:
        version = pointed(http, source, **more)
        assert (version["architecture"], version["base_model"], version["method"]) == (
            "LlamaForCausalLM",
            "zenlm/zen-7b",
            "lora",
        )
        assert version["artifacts"] == {"safetensors": weights, "mlflow": folder}
        assert version["metrics"] == {"eval/loss": 0.25}
        assert version["training_config"] == {"method": "lora", "learning_rate": 2e-5}
    copy = pointed(http, "models:/pointed/1")
    assert {key: copy[key] for key in ("architecture", "artifacts", "metrics", "training_config")} == {
        key: version[key] for key in ("architecture", "artifacts", "metrics", "training_config")
    }
    part = pointed(http, f"runs:/{run}/final/model", run_id=run)
    assert part["artifacts"] == {"safetensors": weights}
    own = register(http, artifact_uri=f"runs:/{run}/final", metrics={"auc": 0.97}).json()
    assert (own["metrics"], own["artifacts"]) == ({"auc": 0.97}, version["artifacts"])
    moved = http.put("/v1/models/pointed/versions/1/stage", json={"stage": "production"}).json()
    assert (moved["servable"], moved["status"], moved["reason"]) == (False, "ready", "not served: no file")


def test_unknown_fields_of_a_version_are_null(http: TestClient, settings: Settings) -> None:
    """A run of another server, files that were never uploaded here, and empty descriptions."""
    foreign = pointed(http, "runs:/of-another-server/model", run_id="of-another-server")
    unknown = ("architecture", "base_model", "method", "artifacts", "metrics", "training_config")
    assert [foreign[key] for key in unknown] == [None, None, None, {}, {}, {}]
    Store(settings.store).put_bytes(f"{FILES}/w.safetensors", b"w")
    by_hand = pointed(http, FILES)
    assert by_hand["artifacts"] == {"safetensors": {"path": f"{FILES}/w.safetensors", "size_bytes": 1, "checksum": None}}
    for mlmodel in (b"[]", b"flavors: 7", b"\xff", b"a: &a [x]\nb: [*a, *c]", b"flavors: {1: x}"):
        run, _ = logged_model(http, "odd", {"MLmodel": mlmodel})
        version = pointed(http, f"runs:/{run}/odd", run_id=run)
        assert version["artifacts"]["mlflow"].keys() == {"path", "size_bytes", "checksum"}


@pytest.mark.parametrize("config", [b"{", b"[]", b'{"architectures": "x"}', b'{"architectures": [7]}', b"[" * 100_000])
def test_version_with_unusable_config_json_is_registered_without_architecture(http: TestClient, config: bytes) -> None:
    run = http.post("/v1/runs", json={"experiment_name": "e"}).json()["id"]
    http.post(f"/v1/runs/{run}/artifacts", params={"key": "final/config.json"}, content=config)
    answer = http.post("/v1/models/m/versions", json={"run_id": run, "artifact": "final"})
    assert (answer.status_code, answer.json()["architecture"], answer.json()["artifacts"]) == (201, None, {}), answer.text


def checkpoints(http: TestClient, *keys: str) -> str:
    run = str(http.post("/v1/runs", json={"experiment_name": "e"}).json()["id"])
    for key in keys:
        assert http.post(f"/v1/runs/{run}/artifacts", params={"key": key}, content=key.encode()).status_code == 201
    return run


@pytest.mark.parametrize(
    ("logged", "asked", "found"),
    [
        (["checkpoint/step-1000", "checkpoint/step-2000", "eval/report"], "checkpoint/step-final", "checkpoint/step-2000"),
        (["checkpoint/step-9000", "checkpoint/step-10000"], "checkpoint/step-final", "checkpoint/step-10000"),
        (
            ["checkpoint/step-2000", "checkpoint/step-1000/a", "other/step-3"],
            "checkpoint/step-final",
            "checkpoint/step-1000",
        ),
        (["checkpoint/step-1", "checkpoint/step-2", "checkpoint/step-1"], "checkpoint/step-final", "checkpoint/step-1"),
        (["checkpoint/step-1", "checkpoint/step-{step}"], "checkpoint/step-final", "checkpoint/step-{step}"),
        (["checkpoint-1/w", "checkpoint-2/w"], "checkpoint-final", "checkpoint-2"),
        (["checkpoint/step-1", "checkpoint/step-2"], "checkpoint-final", "checkpoint/step-2"),
        (["out/checkpoint-5/w", "checkpoint-6/w"], "out/checkpoint-final", "out/checkpoint-5"),
    ],
)
def test_step_final_artifact_resolves_to_the_last_logged_checkpoint(
    http: TestClient, logged: list[str], asked: str, found: str
) -> None:
    """The specification's own script registers `checkpoint/step-final`, but logs nothing under it: that was a 409."""
    run = checkpoints(http, *logged)
    answer = http.post("/v1/models/m/versions", json={"run_id": run, "artifact": asked, "tags": {"task": "qa"}})
    assert answer.status_code == 201, answer.text
    assert answer.json()["source"] == f"s3://hanzo-ml/runs/{run}/artifacts/{found}"
    assert answer.json()["tags"] == {"task": "qa", "hanzo.artifact": found}


@pytest.mark.parametrize("key", ["checkpoint/step-final", "checkpoint/step-final/model.safetensors"])
def test_artifact_named_step_final_takes_precedence(http: TestClient, key: str) -> None:
    run = checkpoints(http, key, "checkpoint/step-1")
    made = http.post("/v1/models/m/versions", json={"run_id": run, "artifact": "checkpoint/step-final"}).json()
    assert (made["source"].partition("/artifacts/")[2], made["tags"]) == ("checkpoint/step-final", {})


@pytest.mark.parametrize("asked", ["checkpoint/step-final", "checkpoint-final", "step-final", "final", "x/../step-final"])
def test_registering_step_final_of_a_run_without_checkpoints_is_refused(http: TestClient, asked: str) -> None:
    run = checkpoints(http, "eval/step-1", "model.bin")
    refused = http.post("/v1/models/m/versions", json={"run_id": run, "artifact": asked})
    assert (refused.status_code, f"has no artifact '{asked}'" in refused.json()["message"]) == (409, True), refused.text


def test_step_final_of_a_completed_command_job_resolves_to_its_output(
    http: TestClient, settings: Settings, tmp_path: Path
) -> None:
    store, database = Store(settings.store), Database(settings.database_url)
    jobs = Jobs(database)
    job = jobs.submit(name="mine", config={}, user="t", organization="default", type=COMMAND, status="running").id
    (tmp_path / "model.safetensors").write_bytes(b"w")
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    left = store.publish(tmp_path, f"s3://hanzo-ml/checkpoints/{job}/state-1-{'0' * 12}", "checkpoints")
    body = {"run_id": job, "artifact": "checkpoint-final"}
    assert http.post("/v1/models/m/versions", json=body).status_code == 409, "another state may follow"
    with database.write() as connection:
        jobs.complete(connection, job, {"checkpoints": left}, 1.0)
    made = http.post("/v1/models/m/versions", json=body).json()
    assert (made["source"], made["tags"]) == (left.uri, {"hanzo.artifact": "checkpoints"})
    assert (made["architecture"], made["artifacts"]["safetensors"]["size_bytes"]) == ("LlamaForCausalLM", 1)
    files = "/api/2.0/mlflow-artifacts/artifacts/models/m/1"
    assert http.get(f"{files}/model.safetensors").content == b"w"
    database.close()


def logged_run(http: TestClient, params: dict[str, Any] | None = None, *, run: str | None = None) -> str:
    """Create a run with an artifact `weights`: a plain run, or that of a job."""
    run = run or http.post("/v1/runs", json={"experiment_name": "e", "params": params or {}}).json()["id"]
    assert http.post(f"/v1/runs/{run}/artifacts", params={"key": "weights"}, content=b"w").status_code in (200, 201)
    return run


@pytest.mark.parametrize("rate", ["nan", "inf", "1e999"])
def test_nonfinite_parameter_is_stored_as_text_and_versions_stay_readable(http: TestClient, rate: str) -> None:
    """JSON has no such number.

    Registration succeeded, but every later read of the model's versions was a 500.
    """
    run = logged_run(http, {"learning_rate": rate})
    answer = http.post("/v1/models/m/versions", json={"run_id": run, "artifact": "weights"})
    assert (answer.status_code, answer.json()["training_config"]) == (201, {"learning_rate": rate})
    assert len(http.get("/v1/models/m/versions").json()["versions"]) == 1


def test_unknown_method_is_kept_in_training_config_only(http: TestClient) -> None:
    """The version's field accepts full, lora and qlora, and holds 20 characters on PostgreSQL."""
    params = {"method": "gradient boosted decision trees", "dataset_version": "9" * 400}
    answer = http.post("/v1/models/m/versions", json={"run_id": logged_run(http, params), "artifact": "weights"})
    assert (answer.status_code, answer.json()["method"]) == (201, None), answer.text
    assert answer.json()["training_config"]["method"] == params["method"]


def test_running_command_job_registers_its_logged_artifact(http: TestClient, settings: Settings) -> None:
    """The script of a job that trains here calls `run.register_model`, as it does anywhere else."""
    job = http.post("/v1/jobs", json={"name": "mine", "command": ["python", "train.py"]}).json()["id"]
    database = Database(settings.database_url)
    Jobs(database).start(job)
    database.close()
    logged_run(http, run=job)
    answer = http.post("/v1/models/m/versions", json={"run_id": job, "artifact": "weights"})
    assert answer.status_code == 201, answer.text
    assert (answer.json()["run_id"], answer.json()["stage"]) == (job, "none")


@pytest.mark.parametrize(("config", "own"), [({"model": "sandbox"}, "mine"), ({"model": "defined"}, "defined")])
def test_training_run_can_be_registered_only_under_its_own_model_name(
    http: TestClient, settings: Settings, config: dict[str, str], own: str
) -> None:
    """Under another name it stayed in staging, waiting for an export that never came."""
    database = Database(settings.database_url)
    jobs = Jobs(database)
    jobs.submit(name="mine", config=config, user="u", organization="default", id="job-1", status="running")
    with database.write() as connection:
        jobs.complete(connection, "job-1", {}, 1.0)
    database.close()
    refused = http.post("/v1/models/theirs/versions", json={"run_id": "job-1"})
    assert (refused.status_code, f"register it as '{own}'" in refused.json()["message"]) == (409, True), refused.text
    assert "not evaluated yet" in http.post(f"/v1/models/{own}/versions", json={"run_id": "job-1"}).json()["message"]


@pytest.mark.parametrize("tags", [{"": "x"}, {"k" * 251: "x"}, {"k": "v" * 100_001}, {"k": "\0"}])
def test_invalid_version_tag_is_refused_at_registration(models: TestClient, tags: dict[str, str]) -> None:
    run = logged_run(models)
    answer = models.post("/v1/models/m/versions", json={"run_id": run, "artifact": "weights", "tags": tags})
    assert answer.status_code == 400, answer.text
    assert models.get("/v1/models").json() == {"models": []}


@pytest.mark.requirement("Z6")
def test_integer_version_other_than_the_next_is_refused(models: TestClient) -> None:
    """Any other number is a 409."""
    assert register(models, version="1").json()["version"] == 1
    refused = register(models, version="3")
    assert (refused.status_code, refused.json()["error_code"]) == (409, "RESOURCE_CONFLICT")
    assert "use 2" in refused.json()["message"]
    assert register(models, version="2").json()["version"] == 2


def test_version_label_cannot_be_reassigned_by_setting_its_tag(models: TestClient) -> None:
    """Otherwise permission to set tags would allow redirecting a promotion to another version."""
    for label in ("3.1", "3.2"):
        register(models, version=label)
    tag = {"key": "hanzo.version", "value": "3.1"}
    mlflow = "/api/2.0/mlflow/model-versions"
    for version in ("1", "2"):
        name = {"name": "fraud", "version": version}
        assert models.post(f"{mlflow}/set-tag", json={**name, **tag}).status_code == 400
        body = {**name, "key": tag["key"]}
        assert models.request("DELETE", f"{mlflow}/delete-tag", json=body).status_code == 400
    copy = models.post(f"{mlflow}/create", json={"name": "fraud", "source": "models:/fraud/1", "tags": [tag]})
    assert (copy.status_code, "tags" in copy.json()["model_version"]) == (200, False)
    assert models.get("/v1/models/fraud/versions/3.1").json()["version"] == 1
