"""The registry through mlflow's own client, unmodified, against the real server."""

from collections.abc import Callable
from pathlib import Path

import httpx
import mlflow
import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from recipes.storage.artifact_store import Store
from resources.metadata.database import Database
from resources.metadata.registry.model_names import ModelKey
from resources.metadata.registry.model_versions import Registration
from resources.metadata.registry.version_lifecycle import Registry
from tests.support.server_process import ServerProcess


@pytest.fixture(scope="module")
def server(server_on_either: ServerProcess) -> ServerProcess:
    return server_on_either


@pytest.fixture
def client(server: ServerProcess) -> MlflowClient:
    return MlflowClient(server.url)


@pytest.fixture
def run_id(client: MlflowClient, tmp_path: Path) -> str:
    """Create a run with a model's files at `model`."""
    (tmp_path / "MLmodel").write_text("flavors: {}\n")
    run_id = str(client.create_run("0").info.run_id)
    client.log_artifact(run_id, str(tmp_path / "MLmodel"), "model")
    return run_id


@pytest.fixture
def name(request: pytest.FixtureRequest, client: MlflowClient) -> str:
    """Return a model name that only this test uses."""
    name = str(request.node.name)
    client.create_registered_model(name)
    return name


def refusal(call: Callable[[], object]) -> MlflowException:
    with pytest.raises(MlflowException) as caught:
        call()
    return caught.value


def str_of(model_input: list[str]) -> list[str]:
    """A model."""
    return model_input


def stages(client: MlflowClient, name: str) -> dict[str, str]:
    return {version.version: version.current_stage for version in client.search_model_versions(f"name = '{name}'")}


@pytest.mark.requirement("F8")
def test_a_model_is_made_described_tagged_and_deleted(client: MlflowClient) -> None:
    made = client.create_registered_model("whole life", {"team": "risk", "n": 5}, "first")  # type: ignore[dict-item]
    assert (made.name, made.tags, made.description) == ("whole life", {"team": "risk", "n": "5"}, "first")
    assert (made.latest_versions, made.aliases) == ([], {})
    error = refusal(lambda: client.create_registered_model("whole life"))
    assert error.error_code == "RESOURCE_ALREADY_EXISTS" and "Registered Model (name=whole life)" in error.message
    assert client.update_registered_model("whole life", "second").description == "second"
    client.set_registered_model_tag("whole life", "team", "")
    client.delete_registered_model_tag("whole life", "n")
    client.delete_registered_model_tag("whole life", "n")
    assert client.get_registered_model("whole life").tags == {"team": ""}
    client.delete_registered_model("whole life")
    error = refusal(lambda: client.get_registered_model("whole life"))
    assert error.error_code == "RESOURCE_DOES_NOT_EXIST"
    assert "Registered Model with name=whole life not found" in error.message


def test_run_model_is_registered_by_fluent_api_and_downloaded_by_alias(
    server: ServerProcess, client: MlflowClient, run_id: str, tmp_path: Path
) -> None:
    mlflow.set_tracking_uri(server.url)
    version = mlflow.register_model(f"runs:/{run_id}/model", "fluent")
    assert (version.version, version.status, version.run_id, version.current_stage) == ("1", "READY", run_id, "None")
    assert version.source == f"mlflow-artifacts:/0/{run_id}/artifacts/model"
    client.set_registered_model_alias("fluent", "champion", "1")
    found = client.get_model_version_by_alias("fluent", "champion")
    assert (found.version, found.aliases) == ("1", ["champion"])
    for uri in ("models:/fluent@champion", "models:/fluent/1", "models:/fluent/latest"):
        target = tmp_path / uri.replace("/", "_")
        target.mkdir()
        folder = mlflow.artifacts.download_artifacts(uri, dst_path=str(target))
        assert (Path(folder) / "MLmodel").read_text() == "flavors: {}\n"
    assert client.get_registered_model("fluent").aliases == {"champion": "1"}


def test_logged_model_is_registered_by_its_name_in_the_run_and_downloaded(
    server: ServerProcess, client: MlflowClient, name: str, tmp_path: Path
) -> None:
    """MLflow 3's own server accepts it; here the location was missing."""
    mlflow.set_tracking_uri(server.url)
    with mlflow.start_run(experiment_id="0") as run:
        model = mlflow.pyfunc.log_model(name="mod", python_model=str_of, pip_requirements=[])
    run_id = run.info.run_id
    made = client.create_model_version(name, f"runs:/{run_id}/mod", run_id=run_id)
    assert (made.source, made.run_id) == (f"runs:/{run_id}/mod", run_id)
    place = f"mlflow-artifacts:/0/models/{model.model_id}/artifacts"
    assert client.get_model_version_download_uri(name, made.version) == place
    folder = mlflow.artifacts.download_artifacts(f"models:/{name}/1", dst_path=str(tmp_path))
    assert (Path(folder) / "MLmodel").is_file()


def test_model_registered_by_the_asset_graph_is_downloaded_by_mlflow_client(server: ServerProcess, tmp_path: Path) -> None:
    store, database = Store(server.settings.store, server.settings.storage.variables), Database(server.settings.database_url)
    folder = tmp_path / "adapter"
    (folder / "deep").mkdir(parents=True)
    (folder / "adapter.safetensors").write_bytes(b"weights")
    (folder / "deep/config.json").write_text("{}")
    adapter = store.publish(folder, "s3://hanzo-ml/runs/trained-1/checkpoint-final/adapter", "adapter")
    said = Registration("trained-1", "Llama", "base", "lora", {}, {}, adapter.uri, "ann", {})
    with database.write() as connection:
        Registry(database).register(connection, ModelKey("default", "trained"), said, {"adapter": adapter})
    database.close()
    mlflow.set_tracking_uri(server.url)
    found = Path(mlflow.artifacts.download_artifacts("models:/trained/1", dst_path=str(tmp_path / "down")))
    assert (found / "adapter.safetensors").read_bytes() == b"weights"
    assert (found / "deep/config.json").read_text() == "{}"
    one = mlflow.artifacts.download_artifacts("models:/trained/1/deep/config.json", dst_path=str(tmp_path / "one"))
    assert Path(one).read_text() == "{}"
    version = MlflowClient(server.url).get_model_version("trained", "1")
    assert (version.current_stage, version.status, version.user_id) == ("Staging", "PENDING_REGISTRATION", "ann")


@pytest.mark.requirement("O4")
def test_transition_to_production_archives_the_previous_version(client: MlflowClient, run_id: str, name: str) -> None:
    source = f"runs:/{run_id}/model"
    for _ in range(3):
        client.create_model_version(name, source, run_id)
    client.transition_model_version_stage(name, "1", "production")
    assert client.transition_model_version_stage(name, "2", "Production").current_stage == "Production"
    assert stages(client, name) == {"1": "Archived", "2": "Production", "3": "None"}
    client.transition_model_version_stage(name, "1", "Staging")
    client.transition_model_version_stage(name, "3", "Staging", archive_existing_versions=True)
    assert stages(client, name) == {"1": "Archived", "2": "Production", "3": "Staging"}
    latest = {version.current_stage: version.version for version in client.get_latest_versions(name)}
    assert latest == {"Production": "2", "Staging": "3", "Archived": "1"}
    assert [version.version for version in client.get_latest_versions(name, ["staging"])] == ["3"]
    error = refusal(lambda: client.transition_model_version_stage(name, "1", "Canary"))
    expected = "Invalid Model Version stage: Canary. Value must be one of None, Staging, Production, Archived."
    assert error.error_code == "INVALID_PARAMETER_VALUE" and expected in error.message
    error = refusal(lambda: client.transition_model_version_stage(name, "1", "None", archive_existing_versions=True))
    assert error.error_code == "INVALID_PARAMETER_VALUE" and "cannot archive existing model versions" in error.message


def test_version_numbers_are_never_reused(client: MlflowClient, run_id: str, name: str) -> None:
    def create() -> str:
        return str(client.create_model_version(name, f"runs:/{run_id}/model", run_id).version)

    assert [create(), create()] == ["1", "2"]
    client.set_registered_model_alias(name, "newest", "2")
    client.delete_model_version(name, "2")
    assert client.get_registered_model(name).aliases == {}
    assert create() == "3"
    error = refusal(lambda: client.delete_model_version(name, "2"))
    assert error.error_code == "RESOURCE_DOES_NOT_EXIST" and f"Model Version (name={name}, version=2)" in error.message
    client.delete_registered_model(name)
    client.create_registered_model(name)
    assert create() == "4"
    client.rename_registered_model(name, f"{name} elsewhere")
    client.create_registered_model(name)
    assert create() == "5"


def test_rename_keeps_versions_aliases_and_tags(client: MlflowClient, run_id: str, name: str) -> None:
    client.create_model_version(name, f"runs:/{run_id}/model", run_id, tags={"a": "b"}, description="d")
    client.set_registered_model_alias(name, "best", "1")
    client.set_registered_model_tag(name, "team", "risk")
    client.create_registered_model(f"{name}-copies")
    copy = client.copy_model_version(f"models:/{name}@best", f"{name}-copies")
    assert (copy.source, copy.run_id) == (f"models:/{name}/1", run_id)
    client.rename_registered_model(name, f"{name}-2")
    assert refusal(lambda: client.get_model_version(name, "1")).error_code == "RESOURCE_DOES_NOT_EXIST"
    moved = client.get_model_version_by_alias(f"{name}-2", "best")
    assert (moved.name, moved.tags, moved.description, moved.aliases) == (f"{name}-2", {"a": "b"}, "d", ["best"])
    assert client.get_registered_model(f"{name}-2").tags == {"team": "risk"}
    assert client.get_model_version(f"{name}-copies", "1").source == f"models:/{name}-2/1"
    client.delete_registered_model(f"{name}-2")
    # A copy outlives its original.
    assert client.get_model_version_download_uri(f"{name}-copies", "1") == f"runs:/{run_id}/model"
    # In MLflow a model may be renamed to its own name.
    client.rename_registered_model(f"{name}-copies", f"{name}-copies")
    assert client.get_registered_model(f"{name}-copies").name == f"{name}-copies"


@pytest.fixture(scope="module")
def shelf(server: ServerProcess) -> MlflowClient:
    """Create nine models for the searches below; from the third on each has two versions."""
    client = MlflowClient(server.url)
    run_id = str(client.create_run("0").info.run_id)
    client.log_text(run_id, "x", "model/MLmodel")
    for number in range(9):
        client.create_registered_model(f"Shelf{number:02}", tags={"parity": "even" if number % 2 == 0 else "odd"})
        for repeat in range(1 + (number > 1)):
            tags = {"repeat": str(repeat)}
            client.create_model_version(f"Shelf{number:02}", f"runs:/{run_id}/model", run_id, tags=tags)
    prompt = {"name": "ShelfPrompt", "tags": [{"key": "mlflow.prompt.is_prompt", "value": "true"}]}
    assert httpx.post(f"{server.url}/api/2.0/mlflow/registered-models/create", json=prompt).status_code == 200
    return client


@pytest.mark.parametrize(
    ("filter", "found"),
    [
        ("name LIKE 'Shelf0%'", [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        ("name LIKE 'shelf%'", []),
        ("name ILIKE 'shelf%' AND name ILIKE '%7'", [7]),
        ("name = 'Shelf03'", [3]),
        ("name IN ('Shelf03', 'Shelf05', 'nobody')", [3, 5]),
        ("name LIKE 'Shelf%' AND tags.parity = 'odd' AND tag.`parity` != 'even'", [1, 3, 5, 7]),
        ("name LIKE 'Shelf%' AND tags.`mlflow.prompt.is_prompt` != 'true' AND tags.parity LIKE 'e%'", [0, 2, 4, 6, 8]),
    ],
)
@pytest.mark.parametrize("page", [2, 100])
def test_models_are_found_page_by_page(shelf: MlflowClient, filter: str, found: list[int], page: int) -> None:
    names: list[str] = []
    token = None
    while token != "":
        result = shelf.search_registered_models(filter, max_results=page, page_token=token)
        names += [model.name for model in result]
        token = result.token or ""
    assert names == [f"Shelf{number:02}" for number in found]


def test_prompts_are_found_only_when_the_filter_asks_for_them(shelf: MlflowClient) -> None:
    asked = shelf.search_registered_models("tags.`mlflow.prompt.is_prompt` = 'true' AND name LIKE 'Shelf%'")
    assert [model.name for model in asked] == ["ShelfPrompt"]


@pytest.mark.parametrize(
    ("filter", "order", "found"),
    [
        ("name = 'Shelf04'", None, ["4.2", "4.1"]),
        ("name = 'Shelf04'", ["version_number ASC"], ["4.1", "4.2"]),
        (
            "name LIKE 'Shelf0%' AND version_number > 1 AND tags.repeat = '1'",
            ["name DESC"],
            [f"{n}.2" for n in range(8, 1, -1)],
        ),
        ("name LIKE 'Shelf0%' AND version_number = '2'", ["name"], [f"{n}.2" for n in range(2, 9)]),
        ("name LIKE 'Shelf0%' AND version_number = 1", ["name"], [f"{n}.1" for n in range(9)]),
        ("source_path LIKE 'runs:/%' AND name IN ('Shelf02')", ["creation_timestamp ASC"], ["2.1", "2.2"]),
        ("run_id IN ('nobody')", None, []),
    ],
)
@pytest.mark.parametrize("page", [3, 100])
def test_versions_are_found_page_by_page(
    shelf: MlflowClient, filter: str, order: list[str] | None, found: list[str], page: int
) -> None:
    versions: list[str] = []
    token = None
    while token != "":
        result = shelf.search_model_versions(filter, max_results=page, order_by=order, page_token=token)
        versions += [f"{int(version.name.removeprefix('Shelf'))}.{version.version}" for version in result]
        token = result.token or ""
    assert versions == found


def test_prompts_are_registered_loaded_and_searched_as_versions(server: ServerProcess) -> None:
    mlflow.set_tracking_uri(server.url)
    mlflow.genai.register_prompt("greeting", "Hello {{name}}", commit_message="first")
    mlflow.genai.register_prompt("greeting", "Good day {{name}}")
    assert mlflow.genai.load_prompt("prompts:/greeting/2").format(name="Ann") == "Good day Ann"
    assert [prompt.name for prompt in mlflow.genai.search_prompts("name = 'greeting'")] == ["greeting"]
