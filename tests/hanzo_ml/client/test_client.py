"""`import hanzo_ml`: the specification's calls and mlflow's, on the real server."""

import subprocess
import sys
import time
from pathlib import Path
from threading import Thread

import httpx
import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

import hanzo_ml
from hanzo_ml.client.client import Client
from hanzo_ml.client.transport import Refused, Transport
from tests.support.cli.git_checkout import committed
from tests.support.free_ports import free_port
from tests.support.server_process import REPOSITORY, ServerProcess, environment


@pytest.fixture
def client(server: ServerProcess) -> Client:
    return Client({"HANZO_ML_TRACKING_URI": server.url, "HANZO_ML_EXPERIMENT": "finance"})


@pytest.fixture
def mlflow(server: ServerProcess) -> MlflowClient:
    return MlflowClient(server.url)


@pytest.mark.requirement("T1", "Z17")
def test_example_of_the_specification_runs(client: Client, mlflow: MlflowClient, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep/weights.bin").write_bytes(b"w")
    (tmp_path / "config.yaml").write_text("a: 1")
    with client.start_run(run_name="qlora-lr2e5-r64") as run:
        run.log_params({"model": "zen-72b", "learning_rate": 2e-5, **{f"p{number}": number for number in range(150)}})
        for step in range(0, 300, 100):
            run.log_metrics({"train/loss": 1 / (step + 1), "gpu/memory_used_gb": 72.4}, step=step)
        run.log_artifact("checkpoint/step-{step}", folder)
        run.log_artifact("settings/used.yaml", tmp_path / "config.yaml")
        assert client.active_run() is run
    assert client.active_run() is None
    found = mlflow.get_run(run.id)
    assert (found.info.run_name, found.info.status) == ("qlora-lr2e5-r64", "FINISHED")
    assert mlflow.get_experiment(found.info.experiment_id).name == "finance"
    assert (found.data.params["learning_rate"], len(found.data.params)) == ("2e-05", 152)
    assert [point.step for point in mlflow.get_metric_history(run.id, "train/loss")] == [0, 100, 200]
    assert [file.path for file in mlflow.list_artifacts(run.id)] == ["checkpoint", "settings"]
    assert [file.path for file in mlflow.list_artifacts(run.id, "checkpoint/step-{step}/deep")] == [
        "checkpoint/step-{step}/deep/weights.bin"
    ]
    assert Path(mlflow.download_artifacts(run.id, "settings/used.yaml", str(tmp_path))).read_text() == "a: 1"


@pytest.mark.requirement("T4")
def test_an_exception_marks_the_run_failed_and_keeps_its_metrics(client: Client, mlflow: MlflowClient) -> None:
    with pytest.raises(ZeroDivisionError), client.start_run() as run:
        run.log_metric("loss", 1.5, step=3)
        raise ZeroDivisionError
    found = mlflow.get_run(run.id)
    assert (found.info.status, found.data.metrics) == ("FAILED", {"loss": 1.5})
    assert found.info.end_time is not None


@pytest.mark.parametrize(("last_line", "status"), [("raise ZeroDivisionError", "FAILED"), ("print('well')", "FINISHED")])
def test_exception_marks_the_run_failed_without_a_with_statement(
    server: ServerProcess, mlflow: MlflowClient, tmp_path: Path, last_line: str, status: str
) -> None:
    script = tmp_path / "script.py"
    first_lines = "import hanzo_ml\nrun = hanzo_ml.start_run()\nprint(run.id)\nrun.log_metric('loss', 1.5)\n"
    script.write_text(first_lines + last_line)
    env = environment(tmp_path, server.port) | {"HANZO_ML_TRACKING_URI": server.url, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, check=False, timeout=120)
    found = mlflow.get_run(done.stdout.split()[0])
    assert (found.info.status, found.data.metrics) == (status, {"loss": 1.5}), done.stderr


def test_local_server_is_contacted_without_a_proxy(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    transport = Transport(server.url)
    assert transport.create_run("0", "near", 0, {}, key="near")


def test_run_is_resumed_by_its_id(client: Client, mlflow: MlflowClient) -> None:
    with client.start_run() as first:
        first.log_metric("loss", 2.0, step=1)
    with client.start_run(run_id=first.id) as second:
        assert mlflow.get_run(first.id).info.status == "RUNNING"
        second.log_metric("loss", 1.0, step=2)
    assert second.id == first.id
    assert [point.value for point in mlflow.get_metric_history(first.id, "loss")] == [2.0, 1.0]


def test_first_run_inside_a_job_is_that_of_the_job(server: ServerProcess, client: Client, mlflow: MlflowClient) -> None:
    with client.start_run() as run:
        pass
    in_job = Client({"HANZO_ML_TRACKING_URI": server.url, "HANZO_ML_RUN_ID": run.id})
    with in_job.start_run(run_name="qlora") as same:
        same.log_metric("loss", 1.5)
        assert mlflow.get_run(run.id).info.status == "RUNNING"
    assert same.id == run.id and mlflow.get_run(run.id).data.metrics == {"loss": 1.5}
    with in_job.start_run() as another:
        assert another.id != run.id


def test_changing_a_param_value_is_refused(client: Client) -> None:
    with pytest.raises(MlflowException, match="Changing param values is not allowed"), client.start_run() as run:
        run.log_param("lr", 1)
        run.log_param("lr", 2)


def test_missing_artifact_file_is_refused_by_name(client: Client, tmp_path: Path) -> None:
    with client.start_run() as run, pytest.raises(FileNotFoundError, match="nothing-here"):
        run.log_artifact("key", tmp_path / "nothing-here")


def test_metrics_survive_a_server_restart_within_the_run(
    client: Client, mlflow: MlflowClient, server: ServerProcess
) -> None:
    with client.start_run() as run:
        for step in range(500):
            run.log_metric("loss", float(step), step)
            if step == 200:
                server.kill()
        server.start()
    assert [point.step for point in mlflow.get_metric_history(run.id, "loss")] == list(range(500))


@pytest.mark.requirement("T2", "Z17")
def test_script_with_mlflow_calls_logs_to_its_run(server: ServerProcess, mlflow: MlflowClient, tmp_path: Path) -> None:
    script = """
import hanzo_ml as mlflow
mlflow.log_param("a", 1)
mlflow.log_params({"b": 2})
mlflow.log_metric("loss", 0.42)
mlflow.log_metrics({"acc": 0.5, "f1": 0.25}, step=2)
mlflow.set_tag("team", "x")
mlflow.log_artifact("best_model.pt", "models")
"""
    (tmp_path / "best_model.pt").write_bytes(b"w")
    (tmp_path / "train.py").write_text(script)
    commit = committed(tmp_path)
    environ = {
        **environment(tmp_path, server.port),
        "HANZO_ML_TRACKING_URI": server.url,
        "HANZO_ML_EXPERIMENT": "scripts",
        "PYTHONPATH": str(REPOSITORY),
    }
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    experiment = mlflow.get_experiment_by_name("scripts")
    assert experiment is not None
    [run] = mlflow.search_runs([experiment.experiment_id])
    assert (run.info.status, run.data.params) == ("FINISHED", {"a": "1", "b": "2"})
    assert run.data.metrics == {"loss": 0.42, "acc": 0.5, "f1": 0.25}
    assert run.data.tags["team"] == "x" and run.data.tags["mlflow.source.name"] == "train.py"
    assert httpx.get(f"{server.url}/v1/runs/{run.info.run_id}", trust_env=False).json()["git_commit"] == commit
    assert [file.path for file in mlflow.list_artifacts(run.info.run_id, "models")] == ["models/best_model.pt"]


def test_registering_makes_the_next_version_of_a_model(client: Client, tmp_path: Path) -> None:
    (tmp_path / "weights.safetensors").write_bytes(b"w")
    versions = []
    for _ in range(2):
        with client.start_run() as run:
            run.log_artifact("checkpoint/step-final", tmp_path / "weights.safetensors")
            made = run.register_model(name="zen", artifact_path="checkpoint/step-final", tags={"task": "qa"})
            assert run.register_model(name="zen", artifact_path="checkpoint/step-final") == made
        versions.append((made.name, made.version, made.stage))
    assert versions == [("zen", 1, "none"), ("zen", 2, "none")]


@pytest.mark.requirement("O10", "T1")
def test_registering_step_final_uses_the_last_checkpoint(client: Client, tmp_path: Path) -> None:
    """Nothing is logged under the name that it registers."""
    (tmp_path / "model.safetensors").write_bytes(b"w")
    with client.start_run() as run:
        for step in (1000, 2000):
            run.log_artifact(f"checkpoint/step-{step}", tmp_path)
        run.register_model(name="final", artifact_path="checkpoint/step-final", tags={"task": "finance-qa"})
    answer = httpx.get(f"{client.tracking_uri}/v1/models/final/versions/1", trust_env=False).json()
    assert answer["tags"] == {"task": "finance-qa", "hanzo.artifact": "checkpoint/step-2000"}
    assert answer["artifacts"]["safetensors"]["path"] == f"{answer['source']}/model.safetensors"


def test_registering_a_missing_artifact_is_refused(client: Client) -> None:
    with client.start_run() as run, pytest.raises(Refused, match="has no artifact 'nothing'"):
        run.register_model(name="zen", artifact_path="nothing")


def test_registering_survives_a_server_restart(client: Client, server: ServerProcess, tmp_path: Path) -> None:
    (tmp_path / "weights.safetensors").write_bytes(b"w")
    with client.start_run() as run:
        run.log_artifact("model", tmp_path / "weights.safetensors")
        server.kill()
        back = Thread(target=lambda: (time.sleep(1), server.start()))
        back.start()
        assert run.register_model(name="waited for", artifact_path="model").version == 1
        back.join(60)


@pytest.mark.parametrize("kind", ["proxied", "folder"])
def test_artifact_is_stored_at_the_location_of_its_experiment(
    server: ServerProcess, mlflow: MlflowClient, tmp_path: Path, kind: str
) -> None:
    """As with mlflow's own client, which then finds it."""
    location = "mlflow-artifacts:/team a" if kind == "proxied" else (tmp_path / "ours").as_uri()
    mlflow.create_experiment(kind, artifact_location=location)
    folder = tmp_path / "made"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep/a.txt").write_text("a")
    with Client({"HANZO_ML_TRACKING_URI": server.url, "HANZO_ML_EXPERIMENT": kind}).start_run() as run:
        run.log_artifact("model", folder)
        run.log_artifact("notes", folder / "deep/a.txt")
    assert [(file.path, file.is_dir) for file in mlflow.list_artifacts(run.id)] == [("model", True), ("notes", False)]
    assert [file.path for file in mlflow.list_artifacts(run.id, "model/deep")] == ["model/deep/a.txt"]
    assert Path(mlflow.download_artifacts(run.id, "notes", str(tmp_path))).read_text() == "a"
    if kind == "folder":
        assert (tmp_path / "ours" / run.id / "artifacts/model/deep/a.txt").read_text() == "a"


def test_import_loads_no_heavy_modules() -> None:
    code = "import sys, hanzo_ml; print(sorted({'mlflow', 'httpx', 'pydantic', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_metric_buffer_does_not_import_mlflow() -> None:
    code = "import sys, hanzo_ml.client.buffer; print('mlflow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_public_names_are_callable() -> None:
    assert all(callable(getattr(hanzo_ml, name)) for name in hanzo_ml.__all__)
