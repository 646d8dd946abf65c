"""mlflow's own client, unmodified, against the real server: only the tracking URI differs."""

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag, ViewType
from mlflow.exceptions import MlflowException

from tests.support.server_process import ServerProcess

SCRIPT = """
import mlflow
mlflow.set_experiment("finance")
with mlflow.start_run(run_name="baseline"):
    mlflow.log_param("learning_rate", 2e-5)
    mlflow.log_param("model", "zen-7b")
    mlflow.log_metric("loss", 0.42)
    mlflow.log_metric("loss", 0.40, step=1)
    with open("best_model.pt", "wb") as file:
        file.write(b"weights")
    mlflow.log_artifact("best_model.pt")
"""


@pytest.fixture(scope="module")
def server(server_on_either: ServerProcess) -> ServerProcess:
    return server_on_either


@pytest.fixture
def client(server: ServerProcess) -> MlflowClient:
    return MlflowClient(server.url)


@pytest.fixture
def run_id(client: MlflowClient) -> str:
    return str(client.create_run("0").info.run_id)


@pytest.mark.requirement("F3", "F7")
def test_unmodified_mlflow_script_logs_params_metrics_and_files(
    server: ServerProcess, client: MlflowClient, tmp_path: Path
) -> None:
    environ = {**os.environ, "MLFLOW_TRACKING_URI": server.url}
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    experiment = client.get_experiment_by_name("finance")
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id], "status = 'FINISHED' and metrics.loss < 0.41")
    assert run.info.run_name == "baseline"
    assert run.info.artifact_uri == f"mlflow-artifacts:/{experiment.experiment_id}/{run.info.run_id}/artifacts"
    assert run.data.params == {"learning_rate": "2e-05", "model": "zen-7b"}
    assert [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, "loss")] == [
        (0, 0.42),
        (1, 0.4),
    ]
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["best_model.pt"]
    fetched = client.download_artifacts(run.info.run_id, "best_model.pt", str(tmp_path))
    assert Path(fetched).read_bytes() == b"weights"


def test_artifact_folders_and_non_ascii_names_round_trip(client: MlflowClient, run_id: str, tmp_path: Path) -> None:
    folder = tmp_path / "up"
    folder.mkdir()
    names = ["a b.txt", "ü+{step}.json", "x=1&y.txt"]
    for name in names:
        (folder / name).write_text(name)
    client.log_artifacts(run_id, str(folder), "deep/er")
    assert [file.path for file in client.list_artifacts(run_id)] == ["deep"]
    assert sorted(file.path for file in client.list_artifacts(run_id, "deep/er")) == sorted(
        f"deep/er/{name}" for name in names
    )
    fetched = Path(client.download_artifacts(run_id, "deep", str(tmp_path / "down")))
    assert {file.name: file.read_text() for file in (fetched / "er").iterdir()} == {name: name for name in names}


@pytest.mark.requirement("F10")
def test_nan_and_infinity_metrics_round_trip(client: MlflowClient, run_id: str) -> None:
    client.log_batch(run_id, metrics=[Metric("n", math.nan, 1, 0), Metric("i", math.inf, 1, 0)])
    metrics = client.get_run(run_id).data.metrics
    assert math.isnan(metrics["n"])
    assert metrics["i"] == 1.7976931348623157e308


@pytest.mark.requirement("F2")
def test_batches_tags_and_status_are_stored(client: MlflowClient, run_id: str) -> None:
    metrics = [Metric("loss", 1.0 / (step + 1), 1000 + step, step) for step in range(1000)]
    client.log_batch(run_id, metrics=metrics)
    client.log_batch(run_id, params=[Param("a", "1")], tags=[RunTag("t", "x")])
    client.delete_tag(run_id, "t")
    client.set_terminated(run_id, "KILLED")
    run = client.get_run(run_id)
    assert (run.info.status, run.data.params, "t" in run.data.tags) == ("KILLED", {"a": "1"}, False)
    assert run.info.end_time is not None
    assert len(client.get_metric_history(run_id, "loss")) == 1000


@pytest.mark.requirement("F12")
@pytest.mark.parametrize("theirs", ["SCHEDULED", "RUNNING", "FINISHED", "FAILED", "KILLED"])
def test_every_run_status_round_trips(client: MlflowClient, run_id: str, theirs: str) -> None:
    client.update_run(run_id, status=theirs)
    assert client.get_run(run_id).info.status == theirs
    found = client.search_runs(["0"], f"status = '{theirs}' and run_id IN ('{run_id}')")
    assert [run.info.run_id for run in found] == [run_id]
    assert not client.search_runs(["0"], f"status != '{theirs}' and attributes.run_id = '{run_id}'")


@pytest.mark.requirement("F1")
def test_experiments_are_tagged_renamed_deleted_and_restored(client: MlflowClient) -> None:
    experiment_id = client.create_experiment("cycle", tags={"a": "b"})
    client.set_experiment_tag(experiment_id, "c", "d")
    client.delete_experiment_tag(experiment_id, "a")
    client.rename_experiment(experiment_id, "cycle2")
    assert client.get_experiment(experiment_id).tags == {"c": "d"}
    run_id = client.create_run(experiment_id).info.run_id
    client.delete_experiment(experiment_id)
    deleted = client.get_experiment_by_name("cycle2")
    assert deleted is not None
    assert (deleted.lifecycle_stage, client.get_run(run_id).info.lifecycle_stage) == ("deleted", "deleted")
    assert experiment_id in [found.experiment_id for found in client.search_experiments(view_type=ViewType.DELETED_ONLY)]
    with pytest.raises(MlflowException, match="must be in the 'active' state"):
        client.create_run(experiment_id)
    client.restore_experiment(experiment_id)
    assert client.get_run(run_id).info.lifecycle_stage == "active"
    [found] = client.search_experiments(filter_string="name = 'cycle2' and tags.c = 'd'")
    assert found.experiment_id == experiment_id


def test_run_search_is_paginated(client: MlflowClient) -> None:
    experiment_id = client.create_experiment("pages")
    made = [client.create_run(experiment_id, start_time=number).info.run_id for number in range(1, 6)]
    found, token = [], None
    for _ in made:
        page = client.search_runs([experiment_id], max_results=2, order_by=["start_time ASC"], page_token=token)
        found += [run.info.run_id for run in page]
        token = page.token
        if not token:
            break
    assert found == made


@pytest.mark.requirement("F10")
def test_errors_have_mlflows_codes(client: MlflowClient, run_id: str) -> None:
    client.log_param(run_id, "a", 1)
    client.log_param(run_id, "a", 1)
    client.create_experiment("taken")
    refusals: dict[str, Callable[[], object]] = {
        "INVALID_PARAMETER_VALUE": lambda: client.log_param(run_id, "a", 2),
        "RESOURCE_DOES_NOT_EXIST": lambda: client.get_run("0" * 32),
        "RESOURCE_ALREADY_EXISTS": lambda: client.create_experiment("taken"),
    }
    for code, call in refusals.items():
        with pytest.raises(MlflowException) as refusal:
            call()
        assert refusal.value.error_code == code
    client.delete_run(run_id)
    with pytest.raises(MlflowException, match="must be in the 'active' state"):
        client.log_metric(run_id, "a", 1)
    client.restore_run(run_id)
    client.log_metric(run_id, "a", 1)
