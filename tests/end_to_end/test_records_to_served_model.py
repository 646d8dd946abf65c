"""From a file of records to a served and proved model, with every required refusal."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from gguf import GGUFReader

from recipes.storage.artifact_store import Store
from resources.metadata.database import Database
from resources.metadata.jobs import Jobs
from resources.metadata.registry.model_names import ModelKey
from resources.metadata.registry.version_lifecycle import Registration, Registry
from resources.settings.settings import Settings
from tests.end_to_end.conftest import STEPS, Baseline
from tests.end_to_end.local_stack import LocalStack, wait_until
from tests.support.assets.dagster_graphql import graphql

NAME = "doors"


@pytest.fixture(scope="module")
def served(stack: LocalStack, baseline: Baseline) -> int:
    """Return the baseline's version, promoted by command and deployed by the sensor."""
    version = stack.events("model.registered", key=NAME)[0]["payload"]["version"]
    stack.hanzo_ml("model", "promote", "--name", NAME, "--version", str(version), "--stage", "production")
    stack.wait_for("deployment.serving", NAME)
    return int(version)


def ask(stack: LocalStack, model: str) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "What colour has door number 3?"}], "max_tokens": 8}
    return stack.http.post(stack.url("HANZO_ML_ENGINE_PORT") + "/v1/chat/completions", json=body)


def version_of(stack: LocalStack, name: str, number: int) -> dict[str, Any]:
    return dict(stack.get(f"/v1/models/{name}/versions/{number}"))


def test_every_step_of_training_is_tracked_once(baseline: Baseline) -> None:
    assert [step for step, _ in baseline.losses] == list(range(1, STEPS + 1))


@pytest.mark.parametrize("program", ["train", "evaluate", "convert"])
def test_program_log_contains_no_library_warnings(stack: LocalStack, baseline: Baseline, program: str) -> None:
    """It began with two warnings about an uninstalled package and a missing accelerator."""
    stack.wait_for("model.registered", NAME)
    lines = (stack.home / "jobs" / baseline.job / program / "log.txt").read_text().splitlines()
    assert lines and [line for line in lines if not re.match(r"\d\d:\d\d:\d\d ", line)] == []


@pytest.mark.requirement("O1", "O9")
def test_version_has_the_specified_fields(stack: LocalStack, baseline: Baseline, served: int) -> None:
    version = version_of(stack, NAME, served)
    assert version["version"] == 1
    assert version["stage"] == "production"
    assert version["architecture"] == "LlamaForCausalLM"
    assert version["run_id"] == baseline.job
    assert set(version["artifacts"]) == {"adapter", "merged", "gguf"}
    for artifact in version["artifacts"].values():
        assert artifact["checksum"].startswith("sha256:")
        assert artifact["size_bytes"] > 0
    assert version["training_config"]["dataset"] == "colours"
    assert version["training_config"]["dataset_version"] == 1
    assert version["training_config"]["total_steps"] == STEPS


@pytest.mark.requirement("E4", "E5", "I7")
def test_run_has_the_specified_metrics_and_artifacts(stack: LocalStack, baseline: Baseline) -> None:
    run = stack.get(f"/v1/runs/{baseline.job}")
    measured = run["system_metrics"]
    assert set(measured) == {"gpu_type", "gpu_count", "total_gpu_hours", "peak_memory_gb", "total_tokens_processed"}
    assert measured["peak_memory_gb"] > 0 and measured["total_tokens_processed"] > 0
    places = {artifact["key"]: artifact["path"] for artifact in run["artifacts"]}
    assert places[f"checkpoint/step-{STEPS}"] == f"s3://hanzo-ml/checkpoints/{baseline.job}/{STEPS}/"
    [best] = [key for key in places if key.startswith("best_model_step_")]
    assert places[best].endswith(f"/{best.removeprefix('best_model_step_')}/")


@pytest.mark.requirement("N5", "P2")
def test_the_model_is_served(stack: LocalStack, served: int) -> None:
    answer = ask(stack, NAME)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"]


@pytest.mark.requirement("A9")
def test_asset_partitions_are_run_ids_and_materializations_have_metadata(
    stack: LocalStack, baseline: Baseline, served: int
) -> None:
    query = """query($key: AssetKeyInput!) { assetNodeOrError(assetKey: $key) { ... on AssetNode {
        groupName kinds partitionKeys assetMaterializations(limit: 1) { partition metadataEntries { label } } } } }"""
    for step, label in (
        ("checkpoint", "loss"),
        ("evaluation", "report"),
        ("version", "status"),
        ("gguf", "digest"),
        ("deployment", "sha256"),
    ):
        body = {"query": query, "variables": {"key": {"path": ["models", "sandbox", step]}}}
        answer = stack.http.post(stack.url("HANZO_ML_DAGSTER_PORT") + "/graphql", json=body).json()
        node = answer["data"]["assetNodeOrError"]
        assert node["groupName"] == "models_sandbox"
        assert baseline.job in node["partitionKeys"]
        assert node["kinds"]
        assert label in [entry["label"] for entry in node["assetMaterializations"][0]["metadataEntries"]], step


def test_the_served_version_is_proved_and_every_flipped_bit_is_named(stack: LocalStack, served: int) -> None:
    proof = json.loads(stack.hanzo_ml("model", "prove", NAME, str(served), "--json").stdout)
    assert proof["ok"], proof["broken"]
    labels = labels_of(proof["chain"])
    chain = ["served file", "export", "merged weights", "adapter checkpoint", "run", "base model"]
    assert [label for label in chain if label not in labels] == []
    assert {"train split", "validation split", "dataset version", "source files"} <= labels
    flipped: list[Path] = []
    for node in nodes_of(proof["chain"]):
        if not node["uri"].startswith("s3://") or node["seen_above"] or not node["files"]:
            continue
        folder = stack.path(node["uri"])
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            flip_bit(file)
            try:
                broken = stack.get(f"/v1/models/{NAME}/versions/{served}/proof")["broken"]
            finally:
                flip_bit(file)
            assert any(file.name in edge and node["label"] in edge for edge in broken), (file, broken)
            flipped.append(file)
    assert len(flipped) > 20
    flip_bit(flipped[-1])
    try:
        refused = stack.hanzo_ml("model", "prove", NAME, str(served), check=False)
    finally:
        flip_bit(flipped[-1])
    assert refused.returncode == 1
    assert flipped[-1].name in refused.stdout
    assert stack.hanzo_ml("model", "prove", NAME, str(served)).returncode == 0


def labels_of(node: dict[str, Any]) -> set[str]:
    return {found["label"] for found in nodes_of(node)}


def nodes_of(node: dict[str, Any]) -> list[dict[str, Any]]:
    return [node, *(found for parent in node["made_from"] for found in nodes_of(parent))]


def flip_bit(file: Path) -> None:
    """Flip one bit in the middle of a file; a second call restores it."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.slow
@pytest.mark.long
def test_full_fine_tuning_passes_the_whole_chain(stack: LocalStack, parameters: dict[str, Any], dataset: str) -> None:
    settings = {key: value for key, value in parameters.items() if not key.startswith(("lora", "base_dtype"))}
    job = stack.submit("full", dataset, settings | {"method": "full", "dtype": "float32", "max_steps": 4})
    stack.wait_for("model.exported", "full")
    version = version_of(stack, "full", 1)
    assert version["run_id"] == job
    assert set(version["artifacts"]) == {"weights", "merged", "gguf"}
    proof = json.loads(stack.hanzo_ml("model", "prove", "full", "1", "--json").stdout)
    assert proof["ok"], proof["broken"]
    chain = {"export", "merged weights", "trained weights", "run", "base model", "train split", "source files"}
    assert chain <= labels_of(proof["chain"])


@pytest.mark.requirement("M1", "M4", "Y8")
@pytest.mark.slow
def test_a_worse_model_is_quarantined_and_not_deployed(
    stack: LocalStack, baseline: Baseline, dataset: str, served: int
) -> None:
    job = stack.submit("ruined", dataset, baseline.parameters | {"learning_rate": 1e30, "max_steps": 6})
    registered = stack.wait_for("model.registered", "ruined")["payload"]
    version = version_of(stack, "ruined", registered["version"])
    assert version["run_id"] == job
    assert version["status"] == "quarantined"
    assert version["reason"]
    refused = stack.hanzo_ml("model", "promote", "--name", "ruined", "--version", "1", "--stage", "production", check=False)
    assert refused.returncode == 1
    assert "quarantined" in refused.stderr
    assert stack.events("deployment.started", key="ruined") == []
    assert ask(stack, "ruined").status_code == 404


def another_version(stack: LocalStack, served: int, run_id: str, folder: Path, ruin: Callable[[Path], None]) -> int:
    """Register a version whose file is a corrupted copy of the served one.

    It was corrupted before registration, unnoticed.
    """
    settings = Settings.load(stack.environment)
    database, store = Database(settings.database_url), Store(settings.store)
    good = next(stack.path(version_of(stack, NAME, served)["artifacts"]["gguf"]["path"]).glob("*.gguf"))
    shutil.copy(good, folder / "model.gguf")
    ruin(folder / "model.gguf")
    Jobs(database).submit(
        name=NAME, config={"model": "sandbox"}, user="t", organization="default", id=run_id, status="running"
    )
    export = store.publish(folder, f"s3://hanzo-models/doors/{run_id}/gguf", "gguf")
    registration = Registration(run_id, "LlamaForCausalLM", "", "lora", {}, {}, "", "t", {})
    with database.write() as connection:
        registry = Registry(database)
        version = registry.register(connection, ModelKey("default", NAME), registration, {})
        registry.add_artifacts(connection, version, {"gguf": export})
    return version.version


def promote_in_vain(stack: LocalStack, served: int, version: int) -> str:
    """Promote a version that cannot be served; return why the deployment failed.

    The previous version stays in production.
    """
    stack.hanzo_ml("model", "promote", "--name", NAME, "--version", str(version), "--stage", "production")

    def failed() -> dict[str, Any] | None:
        found = stack.events("deployment.failed", key=NAME)
        return next((event["payload"] for event in found if event["payload"]["version"] == version), None)

    reason = wait_until("the deployment to fail", failed)["reason"]
    assert version_of(stack, NAME, served)["stage"] == "production"
    assert version_of(stack, NAME, version)["stage"] == "staging"
    assert version_of(stack, NAME, version)["deployment"]["status"] == "failed"
    assert ask(stack, NAME).headers["X-Hanzo-Model-Version"] == str(served)
    assert stack.hanzo_ml("model", "prove", NAME, str(served)).returncode == 0
    return str(reason)


def test_a_promotion_that_cannot_be_served_leaves_the_previous_version_serving(
    stack: LocalStack, served: int, tmp_path: Path
) -> None:
    version = another_version(stack, served, "flipped", tmp_path, ruin=lambda file: None)
    flip_bit(next(stack.path(version_of(stack, NAME, version)["artifacts"]["gguf"]["path"]).glob("*.gguf")))
    assert "SHA-256" in promote_in_vain(stack, served, version)


def test_a_version_that_fails_its_smoke_prompts_leaves_the_previous_one_serving(
    stack: LocalStack, served: int, tmp_path: Path
) -> None:
    """Its checksum matches and its file loads, but its NaN weights generate nothing."""
    version = another_version(stack, served, "no-numbers", tmp_path, ruin=without_numbers)
    assert "smoke prompt" in promote_in_vain(stack, served, version)


def without_numbers(file: Path) -> None:
    reader = GGUFReader(file, "r+")
    for tensor in reader.tensors:
        if tensor.name == "output_norm.weight":
            tensor.data[:] = np.nan
    reader.data.flush()


@pytest.mark.requirement("Z1")
def test_version_serves_again_after_down_and_up(stack: LocalStack, served: int) -> None:
    stack.hanzo_ml("down")
    stack.hanzo_ml("up")
    assert version_of(stack, NAME, served)["deployment"]["status"] == "serving"
    wait_until("the model to be served again", lambda: ask(stack, NAME).status_code == 200)
    assert stack.hanzo_ml("model", "prove", NAME, str(served)).returncode == 0


@pytest.mark.slow
def test_reset_cursor_repeats_no_finished_work(stack: LocalStack, baseline: Baseline, served: int) -> None:
    before = run_count(stack)
    for sensor in ("split_new_versions", "start_submitted_jobs", "evaluate_completed_jobs", "deploy_promotions"):
        reset_cursor(stack, sensor)
    seen = newest_tick(stack, "deploy_promotions")
    wait_until("two more ticks", lambda: newest_tick(stack, "deploy_promotions") > seen + 10 or None)
    assert run_count(stack) == before


def selector(stack: LocalStack, sensor: str) -> dict[str, str]:
    found = graphql(stack, "{ repositoriesOrError { ... on RepositoryConnection { nodes { name location { name } } } } }")
    repository = found["repositoriesOrError"]["nodes"][0]
    return {
        "repositoryName": repository["name"],
        "repositoryLocationName": repository["location"]["name"],
        "sensorName": sensor,
    }


def reset_cursor(stack: LocalStack, sensor: str) -> None:
    query = """mutation($selector: SensorSelector!) { setSensorCursor(sensorSelector: $selector, cursor: null) {
        ... on Sensor { name } ... on PythonError { message } } }"""
    assert graphql(stack, query, selector=selector(stack, sensor))["setSensorCursor"] == {"name": sensor}


def newest_tick(stack: LocalStack, sensor: str) -> float:
    query = """query($selector: SensorSelector!) { sensorOrError(sensorSelector: $selector) { ... on Sensor {
        sensorState { ticks(limit: 1) { timestamp } } } } }"""
    ticks = graphql(stack, query, selector=selector(stack, sensor))["sensorOrError"]["sensorState"]["ticks"]
    return float(ticks[0]["timestamp"]) if ticks else 0.0


def run_count(stack: LocalStack) -> int:
    return int(graphql(stack, "{ runsOrError { ... on Runs { count } } }")["runsOrError"]["count"])


def click(
    stack: LocalStack, keys: list[list[str]], partition: str | None = None, config: dict[str, Any] | None = None
) -> str:
    """Launch as Dagster's Materialize button does; return the final status of the run.

    `config` is what a user enters into the launchpad for the one asset that is selected.
    """
    found = selector(stack, "")
    tags = [{"key": "dagster/partition", "value": partition}] if partition else []
    execution = {
        "selector": {
            "repositoryName": found["repositoryName"],
            "repositoryLocationName": found["repositoryLocationName"],
            "jobName": "__ASSET_JOB",
            "assetSelection": [{"path": key} for key in keys],
        },
        "executionMetadata": {"tags": tags},
        "mode": "default",
        "runConfigData": json.dumps({"ops": {"__".join(keys[0]): {"config": config}}} if config else {}),
    }
    mutation = """mutation($params: ExecutionParams!) { launchPipelineExecution(executionParams: $params) {
        __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } } }"""
    launched = graphql(stack, mutation, params=execution)["launchPipelineExecution"]
    assert launched["__typename"] == "LaunchRunSuccess", launched
    query = "query($id: ID!) { runOrError(runId: $id) { ... on Run { status } } }"

    def ended() -> str | None:
        status = graphql(stack, query, id=launched["run"]["runId"])["runOrError"]["status"]
        return str(status) if status in ("SUCCESS", "FAILURE", "CANCELED") else None

    return wait_until("the end of the run", ended)


@pytest.mark.slow
def test_materializing_a_dataset_twice_creates_and_splits_it_once(stack: LocalStack) -> None:
    keys = [["datasets", "ellarin", step] for step in ("version", "train", "validation", "test")]
    for _ in range(2):
        assert click(stack, keys) == "SUCCESS"
    (version,) = stack.get("/v1/datasets", name="ellarin")["datasets"]
    assert version["num_records"] == 480
    assert {name: part["num_records"] for name, part in version["splits"].items()} == {
        "train": 384,
        "validation": 48,
        "test": 48,
    }


@pytest.mark.slow
def test_materializing_a_finished_checkpoint_changes_nothing(stack: LocalStack, baseline: Baseline) -> None:
    assert click(stack, [["models", "sandbox", "checkpoint"]], baseline.job) == "SUCCESS"
    assert stack.losses(baseline.job) == baseline.losses
    assert len(stack.events("job.completed", key=baseline.job)) == 1


def add_partition(stack: LocalStack, partition: str) -> None:
    """Add a partition as the dialog of Dagster's Materialize button does."""
    found = selector(stack, "")
    mutation = """mutation($repository: RepositorySelector!, $key: String!) { addDynamicPartition(
        repositorySelector: $repository, partitionsDefName: "sandbox-runs", partitionKey: $key) { __typename } }"""
    repository = {key: found[key] for key in ("repositoryName", "repositoryLocationName")}
    made = graphql(stack, mutation, repository=repository, key=partition)["addDynamicPartition"]
    assert made["__typename"] == "AddDynamicPartitionSuccess"


@pytest.fixture(scope="module")
def clicked(stack: LocalStack, baseline: Baseline, dataset: str) -> str:
    """Launch a run of six steps with the launchpad's settings."""
    settings = {"name": "clicked", "dataset": dataset, "parameters": baseline.parameters | {"max_steps": 6}}
    add_partition(stack, "by-click")
    assert click(stack, [["models", "sandbox", "checkpoint"]], "by-click", settings) == "SUCCESS"
    assert stack.get("/v1/jobs/by-click")["status"] == "completed"
    assert click(stack, [["models", "sandbox", "checkpoint"]], "by-click", settings | {"dataset": "other"}) == "FAILURE"
    return "by-click"


@pytest.mark.requirement("A2")
@pytest.mark.slow
def test_training_and_promotion_launched_in_dagster_are_served(stack: LocalStack, clicked: str) -> None:
    """Training and promotion are launched manually; sensors do all other steps."""
    stack.wait_for("model.exported", "clicked")
    assert click(stack, [["models", "sandbox", "promotion"]], clicked) == "SUCCESS"
    stack.wait_for("deployment.serving", "clicked")
    assert ask(stack, "clicked").status_code == 200
    assert stack.hanzo_ml("model", "prove", "clicked", "1").returncode == 0


@pytest.mark.requirement("B11", "E13", "Y11")
@pytest.mark.slow
def test_a_finished_run_is_replayed_from_its_record_alone(stack: LocalStack, clicked: str) -> None:
    verdict = json.loads(stack.hanzo_ml("run", "replay", clicked, "--json").stdout)
    assert verdict["equal"], verdict
    assert (verdict["run"], verdict["steps"], verdict["environment"]) == (clicked, 6, [])
    replay = verdict["replay"]
    assert stack.adapter_sha256(replay) == stack.adapter_sha256(clicked)
    assert stack.losses(replay) == stack.losses(clicked)
    assert stack.get(f"/v1/runs/{replay}")["tags"]["hanzo_ml.replay_of"] == clicked
    # It is no new model: the sensor skips it.
    seen = newest_tick(stack, "evaluate_completed_jobs")
    wait_until("another tick", lambda: newest_tick(stack, "evaluate_completed_jobs") > seen + 5 or None)
    assert stack.events("evaluation.started", key=replay) == []


@pytest.mark.slow
@pytest.mark.long
def test_failed_export_emits_an_event_with_its_error(stack: LocalStack, baseline: Baseline, dataset: str) -> None:
    """The adapter is corrupt after training: the log must end in an event."""
    settings = baseline.parameters | {"max_steps": 2}
    job = stack.submit("broken-adapter", dataset, settings)
    stack.wait_for("job.completed", job)
    uri = stack.get(f"/v1/jobs/{job}")["artifacts"]["adapter"]["uri"]
    flip_bit(stack.path(uri) / "adapter_model.safetensors")
    failed = stack.wait_for("evaluation.failed", job)["payload"]
    assert "adapter_model.safetensors" in failed["error"]
    assert failed["error"] == stack.get(f"/v1/jobs/{job}")["reason"]
