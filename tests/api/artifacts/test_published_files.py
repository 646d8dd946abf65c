"""Files that a run's job published are listed and downloaded by mlflow's own client."""

from pathlib import Path

import httpx
import pytest
from mlflow import MlflowClient
from mlflow.artifacts import download_artifacts
from mlflow.exceptions import MlflowException

from tests.api.artifact_server import ArtifactServer
from tests.support.server_process import ServerProcess

WEIGHTS = {"adapter_config.json": b"{}", "adapter_model.safetensors": bytes(range(256)) * 40_000}


@pytest.fixture(scope="module")
def server(server_on_either: ServerProcess) -> ArtifactServer:
    return ArtifactServer(server_on_either)


@pytest.fixture
def run_id(server: ArtifactServer, tmp_path: Path) -> str:
    """Create a run whose job left an adapter, a result and two checkpoints.

    The second checkpoint was written after a rollback to the first. A third one has no manifest yet.
    """
    run, folder = server.new_run(), tmp_path / "weights"
    folder.mkdir()
    for name, data in WEIGHTS.items():
        (folder / name).write_bytes(data)
    server.store.put_bytes(f"s3://hanzo-ml/runs/{run}/train.json", b'{"facts": {}}')
    server.store.publish(folder, f"s3://hanzo-ml/runs/{run}/checkpoint-final/adapter", "adapter")
    server.store.publish(folder, f"s3://hanzo-ml/checkpoints/{run}/10", "checkpoint")
    server.store.publish(folder, f"s3://hanzo-ml/checkpoints/{run}/from-10/20", "checkpoint")
    server.store.put_bytes(f"s3://hanzo-ml/checkpoints/{run}/20/adapter_model.safetensors", b"half of")
    return run


def listed(server: ArtifactServer, run_id: str) -> list[str]:
    """List all files of a run with mlflow's client, folder by folder."""
    client, folders = MlflowClient(server.url), [""]
    found: list[str] = []
    while folders:
        for entry in client.list_artifacts(run_id, folders.pop() or None):
            (folders if entry.is_dir else found).append(entry.path)
    return sorted(found)


def test_mlflow_client_lists_and_downloads_published_checkpoints(
    server: ArtifactServer, run_id: str, tmp_path: Path
) -> None:
    client = MlflowClient(server.url)
    client.log_text(run_id, "mine", "notes.txt")
    client.log_text(run_id, "mine too", "checkpoint/step-final/w.bin")
    wholes = ("checkpoint-final/adapter", "checkpoint/from-10/step-20", "checkpoint/step-10")
    names = (*WEIGHTS, "manifest.json")
    assert listed(server, run_id) == sorted(
        [
            "notes.txt",
            "train.json",
            "checkpoint/step-final/w.bin",
            *(f"{whole}/{name}" for whole in wholes for name in names),
        ]
    )
    for whole in wholes:
        got = Path(download_artifacts(run_id=run_id, artifact_path=whole, dst_path=str(tmp_path), tracking_uri=server.url))
        assert {name: (got / name).read_bytes() for name in WEIGHTS} == WEIGHTS
    keys = {each["key"] for each in httpx.get(f"{server.url}/v1/runs/{run_id}").json()["artifacts"]}
    assert {*wholes, "train.json", "notes.txt"} <= keys, "a path here is the key there"


def test_creating_a_version_from_a_published_file_is_refused_with_the_register_command(
    server: ArtifactServer, run_id: str
) -> None:
    """The server reported a file that the client had just listed as missing."""
    client = MlflowClient(server.url)
    client.create_registered_model(name := f"m-{run_id}")
    for path in ("checkpoint-final", "checkpoint-final/adapter", "checkpoint/from-10/step-20", "train.json"):
        for source in (f"runs:/{run_id}/{path}", f"mlflow-artifacts:/0/{run_id}/artifacts/{path}"):
            with pytest.raises(MlflowException, match=f"hanzo-ml model register --name NAME --run {run_id}"):
                client.create_model_version(name, source, run_id=run_id)
    for path in ("nothing", "artifacts", "artifacts/notes.txt"):
        with pytest.raises(MlflowException, match="There is nothing at that place"):
            client.create_model_version(name, f"runs:/{run_id}/{path}", run_id=run_id)


def test_uploaded_file_shadows_a_published_one_of_the_same_name(server: ArtifactServer, run_id: str) -> None:
    MlflowClient(server.url).log_text(run_id, "mine", "train.json")
    assert server.raw("GET", server.place(run_id, "train.json")).body == b"mine"
    assert server.raw("DELETE", server.place(run_id, "train.json")).status == 200
    assert server.raw("GET", server.place(run_id, "train.json")).body == b'{"facts": {}}'


def test_published_files_cannot_be_deleted_and_corrupt_ones_are_not_served(server: ArtifactServer, run_id: str) -> None:
    for path in ("checkpoint-final", "checkpoint", "checkpoint/step-10", "train.json"):
        answer = server.raw("DELETE", server.place(run_id, path))
        assert answer.status == 400 and b"was published by the run's job" in answer.body
    assert server.raw("DELETE", server.place(run_id, "nothing")).status == 200
    MlflowClient(server.url)._tracking_client._get_artifact_repo(run_id).delete_artifacts()  # as `mlflow gc` does
    assert "checkpoint-final/adapter/adapter_model.safetensors" in listed(server, run_id)
    name = "checkpoint-final/adapter/adapter_config.json"
    server.store.put_bytes(f"s3://hanzo-ml/runs/{run_id}/{name}", b"{?")
    assert server.raw("GET", server.place(run_id, name)).status == 409


@pytest.mark.parametrize("path", ["checkpoint/step-20/adapter_model.safetensors", "artifacts/notes.txt", "checkpoint/10/x"])
def test_unpublished_paths_are_not_found(server: ArtifactServer, run_id: str, path: str) -> None:
    MlflowClient(server.url).log_text(run_id, "mine", "notes.txt")
    assert server.raw("GET", server.place(run_id, path)).status == 404
