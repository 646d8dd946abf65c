"""Artifact proxy paths outside of runs, and experiments with a custom artifact location."""

import json
from pathlib import Path
from typing import Any

import mlflow
import pytest
from mlflow import MlflowClient
from mlflow.artifacts import download_artifacts

from tests.api.artifact_server import PROXY, ArtifactServer
from tests.support.server_process import ServerProcess

JSON = {"Content-Type": "application/json"}
MLFLOW = "/api/2.0/mlflow"


@pytest.fixture(scope="module")
def server(server_on_either: ServerProcess) -> ArtifactServer:
    return ArtifactServer(server_on_either)


@pytest.fixture
def client(server: ArtifactServer) -> MlflowClient:
    mlflow.set_tracking_uri(server.url)
    return MlflowClient(server.url)


def asked(server: ArtifactServer, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    answer = server.raw(method, path, b"" if body is None else json.dumps(body).encode(), JSON)
    return answer.status, json.loads(answer.body)


def listed(server: ArtifactServer, path: str) -> Any:
    return asked(server, "GET", f"{PROXY}?path={path}")[1]["files"]


def test_files_at_free_paths_are_uploaded_listed_and_deleted(server: ArtifactServer) -> None:
    for name, body in (("own/a.txt", b"0"), ("own/dir/b.txt", b"12")):
        assert server.raw("PUT", f"{PROXY}/{name}", body).status == 200
        assert server.raw("GET", f"{PROXY}/{name}").body == body
    assert listed(server, "own") == [
        {"path": "a.txt", "is_dir": False, "file_size": 1},
        {"path": "dir", "is_dir": True},
    ]
    assert listed(server, "own/dir") == [{"path": "b.txt", "is_dir": False, "file_size": 2}]
    assert {"path": "own", "is_dir": True} in json.loads(server.raw("GET", PROXY).body)["files"]
    for _ in range(2):  # a repeated delete has nothing left to do
        assert server.raw("DELETE", f"{PROXY}/own/dir").status == 200
    assert listed(server, "own") == [{"path": "a.txt", "is_dir": False, "file_size": 1}]
    assert server.raw("GET", f"{PROXY}/own/dir/b.txt").status == 404


def test_free_paths_cannot_reach_datasets_checkpoints_or_runs(server: ArtifactServer) -> None:
    run_id = server.new_run()
    checkpoints = server.store.list("s3://hanzo-ml/checkpoints")
    server.raw("PUT", server.place(run_id, "f"), b"the run's")
    server.store.put_bytes("s3://hanzo-ml/datasets/d/1/part", b"the product's")
    for path in (f"runs/{run_id}/artifacts/f", "datasets/d/1/part", "hanzo-ml/datasets/d/1/part", "artifacts/@default/own"):
        assert server.raw("GET", f"{PROXY}/{path}").status == 404
        assert server.raw("PUT", f"{PROXY}/{path}", b"attack").status == 200
        assert server.raw("DELETE", f"{PROXY}/{path}").status == 200
    assert server.raw("GET", server.place(run_id, "f")).body == b"the run's"
    assert server.store.get_bytes("s3://hanzo-ml/datasets/d/1/part") == b"the product's"
    assert server.store.list("s3://hanzo-ml/checkpoints") == checkpoints


def test_file_at_a_free_path_is_hashed_and_verified(server: ArtifactServer) -> None:
    uploaded = server.raw("PUT", f"{PROXY}/verified/f", b"whole")
    assert server.raw("GET", f"{PROXY}/verified/f").headers["X-Checksum-Sha256"] == uploaded.headers["X-Checksum-Sha256"]
    server.store.put_bytes("s3://hanzo-ml/artifacts/@default/verified/f", b"brokn")
    assert server.raw("GET", f"{PROXY}/verified/f").status == 409


@pytest.mark.parametrize("location", ["mlflow-artifacts:/team/a", "mlflow-artifacts:/b/", "mlflow-artifacts:/"])
def test_experiment_with_a_custom_proxied_location_stores_files_there(
    server: ArtifactServer, client: MlflowClient, tmp_path: Path, location: str
) -> None:
    experiment = client.create_experiment(f"at {location}", artifact_location=location)
    run = client.create_run(experiment)
    assert run.info.artifact_uri == f"{location.rstrip('/')}/{run.info.run_id}/artifacts"
    (tmp_path / "f.txt").write_text("text")
    client.log_artifact(run.info.run_id, str(tmp_path / "f.txt"), "deep")
    # The same file by the run, by its path, and by the product's own name for it.
    assert [entry.path for entry in client.list_artifacts(run.info.run_id, "deep")] == ["deep/f.txt"]
    status, found = asked(server, "GET", f"{MLFLOW}/artifacts/list?run_id={run.info.run_id}&path=deep")
    assert (status, [entry["path"] for entry in found["files"]]) == (200, ["deep/f.txt"])
    assert Path(download_artifacts(f"runs:/{run.info.run_id}/deep/f.txt")).read_text() == "text"
    assert server.store.list(f"s3://hanzo-ml/runs/{run.info.run_id}") == [
        f"s3://hanzo-ml/runs/{run.info.run_id}/artifacts/deep/f.txt"
    ]
    client.create_registered_model(name := f"of {experiment}")
    version = client.create_model_version(name, f"{run.info.artifact_uri}/deep", run.info.run_id)
    assert Path(download_artifacts(f"models:/{name}/{version.version}"), "f.txt").read_text() == "text"
    client.delete_run(run.info.run_id)
    path = run.info.artifact_uri.removeprefix("mlflow-artifacts:/")
    assert server.raw("PUT", f"{PROXY}/{path}/late.txt", b"late").status == 400


def test_logged_model_is_stored_below_its_experiments_location(server: ArtifactServer, client: MlflowClient) -> None:
    experiment = client.create_experiment("of models", artifact_location="mlflow-artifacts:/models of ours")
    model = client.create_logged_model(experiment)
    assert model.artifact_location == f"mlflow-artifacts:/models of ours/models/{model.model_id}/artifacts"
    place = f"{PROXY}/models%20of%20ours/models/{model.model_id}/artifacts/MLmodel"
    assert server.raw("PUT", place, b"flavors: {}").status == 200
    status, found = asked(server, "GET", f"{MLFLOW}/logged-models/{model.model_id}/artifacts/directories")
    assert (status, found["files"]) == (200, [{"path": "MLmodel", "is_dir": False, "file_size": 11}])


def test_listing_above_runs_and_models_returns_their_folders(
    server: ArtifactServer, client: MlflowClient, tmp_path: Path
) -> None:
    """A client that downloads `mlflow-artifacts:/EXPERIMENT` descends through all of them."""
    for location, free in (("mlflow-artifacts:/whole", ["a.txt"]), (None, [])):
        experiment = client.create_experiment(f"whole at {location}", artifact_location=location)
        root = client.get_experiment(experiment).artifact_location.removeprefix("mlflow-artifacts:/")
        assert listed(server, root) == []
        run_id, model_id = client.create_run(experiment).info.run_id, client.create_logged_model(experiment).model_id
        client.log_text(run_id, "text", "deep/f.txt")
        for name in free:
            assert server.raw("PUT", f"{PROXY}/{root}/{name}", b"free").status == 200
        assert [entry["path"] for entry in listed(server, root)] == sorted([*free, run_id, "models"])
        assert listed(server, f"{root}/models") == [{"path": model_id, "is_dir": True}]
        for owner in (run_id, f"models/{model_id}"):
            assert listed(server, f"{root}/{owner}") == [{"path": "artifacts", "is_dir": True}]
        fetched = Path(download_artifacts(f"mlflow-artifacts:/{root}", dst_path=str(tmp_path)))
        assert (fetched / run_id / "artifacts/deep/f.txt").read_text() == "text"
        assert sorted(file.name for file in fetched.iterdir() if file.is_file()) == free
    unknown = [
        f"{experiment}/nobody",
        f"{experiment}/models/nobody",
        "987654",
        "987654/models",
        f"{experiment}/{run_id}/other",
    ]
    assert {asked(server, "GET", f"{PROXY}?path={path}")[0] for path in unknown} == {404}


def test_logged_model_of_an_experiment_at_the_root_is_readable(server: ArtifactServer, client: MlflowClient) -> None:
    """Its path was mistaken for that of a registered model version.

    `models/MODEL/artifacts` could be written, but never read.
    """
    model = client.create_logged_model(client.create_experiment("at the root", artifact_location="mlflow-artifacts:/"))
    path = f"models/{model.model_id}/artifacts"
    assert server.raw("PUT", f"{PROXY}/{path}/MLmodel", b"flavors: {}").status == 200
    assert server.raw("GET", f"{PROXY}/{path}/MLmodel").body == b"flavors: {}"
    assert listed(server, path) == [{"path": "MLmodel", "is_dir": False, "file_size": 11}]
    client.create_registered_model("of the root")
    client.create_model_version("of the root", model.model_uri, model_id=model.model_id)
    assert Path(download_artifacts("models:/of the root/1"), "MLmodel").read_bytes() == b"flavors: {}"
    by_version = "/model-versions/get-artifact?name=of%20the%20root&version=1&path=MLmodel"
    assert server.raw("GET", by_version).body == b"flavors: {}"


def test_location_outside_the_store_is_read_and_written_only_by_the_client(
    server: ArtifactServer, client: MlflowClient, tmp_path: Path
) -> None:
    experiment = client.create_experiment("elsewhere", artifact_location=tmp_path.as_uri())
    run = client.create_run(experiment)
    assert run.info.artifact_uri == f"{tmp_path.as_uri()}/{run.info.run_id}/artifacts"
    client.log_text(run.info.run_id, "text", "f.txt")
    assert (tmp_path / run.info.run_id / "artifacts" / "f.txt").read_text() == "text"
    assert [entry.path for entry in client.list_artifacts(run.info.run_id)] == ["f.txt"]
    for path in (f"{MLFLOW}/artifacts/list?run_id={run.info.run_id}", f"/get-artifact?run_id={run.info.run_id}&path=f.txt"):
        status, answer = asked(server, "GET", path)
        assert status == 400 and "which this server cannot read" in answer["message"]
    client.create_registered_model("kept elsewhere")
    version = client.create_model_version("kept elsewhere", f"{run.info.artifact_uri}/f.txt", run.info.run_id)
    assert client.get_model_version_download_uri("kept elsewhere", version.version) == f"{run.info.artifact_uri}/f.txt"
    outside = {"name": "kept elsewhere", "source": f"{run.info.artifact_uri}/../../secret", "run_id": run.info.run_id}
    assert asked(server, "POST", f"{MLFLOW}/model-versions/create", outside)[0] == 400


def test_relative_location_resolves_to_the_servers_working_directory(server: ArtifactServer, client: MlflowClient) -> None:
    experiment = client.create_experiment("relative", artifact_location="my_location")
    assert client.get_experiment(experiment).artifact_location == str(Path.cwd() / "my_location")
