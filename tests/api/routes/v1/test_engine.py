"""/v1/engine: deployments for replicas, the files that they may download, and their reports."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from recipes.storage.artifact_store import hash_file
from resources.metadata.registry.model_names import ModelKey
from resources.metadata.registry.version_lifecycle import Registry
from tests.resources.serving.replica_process import ControlPlaneProcess
from tests.support.resources.model_versions import RegisteredVersions

CONTENT = b"GGUF" + bytes(range(200))


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[ControlPlaneProcess]:
    plane = ControlPlaneProcess(tmp_path)
    plane.server.start()
    yield plane
    plane.close()


@pytest.fixture
def http(plane: ControlPlaneProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=plane.server.url, trust_env=False) as client:
        yield client


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(CONTENT)
    return path


def report(http: httpx.Client, replica: str, **deployment: Any) -> None:
    body = {"ready": True, "deployments": [deployment]}
    http.put(f"/v1/engine/replicas/{replica}", json=body).raise_for_status()


def test_unchanged_deployments_answer_304(plane: ControlPlaneProcess, http: httpx.Client, file: Path) -> None:
    empty = http.get("/v1/engine/deployments")
    assert empty.json() == {"deployments": []}
    asked = {"If-None-Match": empty.headers["ETag"]}
    assert http.get("/v1/engine/deployments", headers=asked).status_code == 304
    sha256 = hash_file(file)
    row, _ = plane.begin(3, plane.upload("keeper/v3", file), sha256)
    changed = http.get("/v1/engine/deployments", headers=asked)
    (found,) = changed.json()["deployments"]
    assert found == {
        "id": row.id,
        "attempt": 1,
        "name": "keeper",
        "version": 3,
        "sha256": sha256,
        "size_bytes": len(CONTENT),
        "smoke_prompts": ["Who keeps the lamp?"],
    }
    assert http.get("/v1/engine/deployments", headers={"If-None-Match": changed.headers["ETag"]}).status_code == 304


def test_wanted_file_is_answered_whole_or_from_an_offset(plane: ControlPlaneProcess, http: httpx.Client, file: Path) -> None:
    sha256 = hash_file(file)
    uri = plane.upload("keeper/v1", file)
    path = f"/v1/engine/files/{sha256}"
    assert http.get(path).status_code == 404, "nothing wants it yet"
    plane.begin(1, uri, sha256)
    assert http.get(path).content == CONTENT
    part = http.get(path, headers={"Range": "bytes=150-"})
    assert (part.status_code, part.content) == (206, CONTENT[150:])
    assert http.get(path, headers={"Range": f"bytes={len(CONTENT)}-"}).status_code == 416
    plane.store.delete(uri)
    missing = http.get(path)
    assert missing.status_code == 404 and "is missing in the object store" in missing.json()["message"]


def test_version_shows_its_state_on_each_replica(plane: ControlPlaneProcess, http: httpx.Client, file: Path) -> None:
    versions = RegisteredVersions(plane.database)
    number = versions.register("r1").version
    model = Registry(plane.database).read(ModelKey("default", "m"), number)
    row, attempt = plane.begin(number, plane.upload("m/v1", file), hash_file(file), model.name)
    path = f"/v1/models/{model.name}/versions/{number}"
    assert "replicas" not in http.get(path).json()
    known = {"deployment": row.id, "attempt": attempt, "name": "m", "version": number, "sha256": row.sha256}
    report(http, "engine-a:8043", **known, status="serving")
    report(http, "engine-b:8043", **known, status="failed", reason="no memory", error_code="SMOKE_FAILED")
    assert http.get(path).json()["replicas"] == [
        {"replica": "engine-a:8043", "status": "serving", "reason": ""},
        {"replica": "engine-b:8043", "status": "failed", "reason": "no memory"},
    ]
    assert http.delete("/v1/engine/replicas/engine-b:8043").json() == {"deleted": "engine-b:8043"}
    assert [each["replica"] for each in http.get(path).json()["replicas"]] == ["engine-a:8043"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/engine/replicas/a%20b", {"ready": True, "deployments": []}),
        ("/v1/engine/replicas/a", {"ready": True}),
        ("/v1/engine/replicas/a", {"ready": True, "deployments": [{"deployment": 1, "status": "away"}]}),
    ],
)
def test_malformed_report_is_refused(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    assert http.put(path, json=body).status_code == 400
