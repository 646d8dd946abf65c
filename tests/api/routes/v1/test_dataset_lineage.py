"""/v1/datasets/{id}/lineage: the inputs of a version, and everything derived from it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from recipes.storage.artifact_store import Store
from resources.metadata.database import Database
from resources.settings.settings import Settings
from tests.support.api.dataset_family import made_into_a_model_and_a_child
from tests.support.resources.lineage import World


@pytest.fixture
def world(settings: Settings, tmp_path: Path) -> Iterator[World]:
    database = Database(settings.database_url)
    yield World(database, Store(settings.store), tmp_path)
    database.close()


def test_lineage_lists_ancestors_and_descendants_and_each_run_once(http: TestClient, world: World) -> None:
    version = made_into_a_model_and_a_child(world)
    found = http.get(f"/v1/datasets/{version.id}/lineage").json()
    assert (found["dataset"], found["parents"], found["children"]) == ("d@1", [], ["child@1"])
    assert [made["kind"] for made in found["made_from"]] == ["source"]
    splits = [f"split at {version.storage_path}splits/x/{split}" for split in ("test", "train", "validation")]
    exports = [f"{kind} at s3://hanzo-models/m/r1/{kind}" for kind in ("gguf", "merged")]
    assert sorted(made["name"] for made in found["made_into"]) == sorted([*splits, "run r1", *exports])
    (run,) = (made for made in found["made_into"] if made["name"] == "run r1")
    assert (run["kind"], run["uri"]) == ("run", "s3://hanzo-ml/runs/r1/record")
    [child] = http.get("/v1/datasets", params={"name": "child"}).json()["datasets"]
    below = http.get(f"/v1/datasets/{child['id']}/lineage").json()
    assert (below["parents"], below["transform"], below["children"], below["made_into"]) == (["d@1"], "cut", [], [])
