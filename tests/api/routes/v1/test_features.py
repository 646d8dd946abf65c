"""/v1/features: features of a prepared version by key, and equal values for raw rows."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import update

from api.app import create_app
from recipes.contracts.job import Hardware, Job, Program
from recipes.contracts.parameters import PrepareParameters
from recipes.prepare import prepare
from recipes.storage.artifact_store import Store
from resources.datasets.prepared_versions import Derivation, add_prepared_version, output_uris
from resources.metadata.audit_log import list_calls
from resources.metadata.database import Database
from resources.metadata.datasets import Datasets, DatasetVersion
from resources.metadata.tables import dataset_versions
from resources.settings.settings import Settings
from tests.api.artifact_server import on_s3
from tests.api.conftest import answering, migrated
from tests.support.api.audited_requests import asking
from tests.support.s3_server import S3Server

FEATURES = {
    "key": "customer",
    "columns": {"plan": {"encode": "one_hot"}, "age": {"normalize": "standard"}},
    "aggregate": {"spend": ["mean", "max", "count"]},
}
ROWS: list[dict[str, Any]] = [
    {"customer": f"c/{n % 7}", "plan": ("free", "pro")[n % 2], "age": 20 + n / 3, "spend": n / 7, "job_id": n}
    for n in range(60)
]
"""One of the user's columns has the name of a request parameter."""
Make = Callable[..., DatasetVersion]


@pytest.fixture
def database(settings: Settings) -> Iterator[Database]:
    database = Database(settings.database_url)
    yield database
    database.close()


@pytest.fixture
def store(settings: Settings) -> Store:
    return Store(settings.store)


@pytest.fixture
def make(http: TestClient, database: Database, store: Store, tmp_path: Path) -> Make:
    return maker(http, database, store, tmp_path)


def maker(http: TestClient, database: Database, store: Store, folder: Path) -> Make:
    """Prepare as the asset graph does."""
    raw = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)
    assert http.post("/v1/datasets", data={"name": "d"}, files={"files": ("d.jsonl", raw)}).status_code == 201

    def made(**sections: Any) -> DatasetVersion:
        parent, parameters = Datasets(database).read("d@1", "default"), PrepareParameters.model_validate(sections)
        place = f"s3://hanzo-ml/datasets/d/prepared-{len(Datasets(database).list('default'))}"
        job = Job(
            id="p",
            program=Program.PREPARE,
            inputs={"dataset": parent.artifact},
            parameters=parameters.model_dump(mode="json"),
            outputs=output_uris(place, with_features=parameters.features is not None),
            result_uri=f"{place}/result.json",
            store=store.address,
            work_dir=str(folder / "work"),
            cache_dir=str(folder / "cache"),
            hardware=Hardware(cpu=1),
        )
        result = prepare(job, store, folder / "work")
        assert result is not None
        version, is_new = add_prepared_version(database, store, Derivation(parent, "d", parameters, "u"), result)
        assert is_new
        return version

    return made


@pytest.mark.requirement("C5")
def test_features_by_key_equal_features_of_the_prepared_version(http: TestClient, make: Make) -> None:
    version = make(features=FEATURES)
    assert version.schema["features"] == "object" and version.metadata["rejected"] == {}
    lines = http.get(f"/v1/datasets/{version.id}/preview", params={"n": 1000}).text.splitlines()
    prepared = [json.loads(line) for line in lines]
    assert len(prepared) == len(ROWS)
    raw = [ROWS[row["job_id"]] for row in prepared]
    answer = http.post("/v1/features/d/transform", json=raw)
    assert answer.status_code == 200, answer.text
    assert answer.json() == {"dataset": "d@2", "features": [row["features"] for row in prepared]}
    last = {row["customer"]: row["features"] for row in sorted(prepared, key=lambda row: row["job_id"])}
    for key, features in last.items():
        found = http.get(f"/v1/features/d/{key.replace('/', '%2F')}")
        assert found.json() == {"dataset": "d@2", "key": key, "features": features}


def test_features_on_s3_equal_features_on_a_folder(http: TestClient, make: Make, s3: S3Server, tmp_path: Path) -> None:
    make(features=FEATURES)
    settings = migrated(tmp_path / "home", **on_s3(s3))
    database = Database(settings.database_url)
    with answering(settings) as there:
        maker(there, database, Store(settings.store, settings.storage.variables), tmp_path / "there")(features=FEATURES)
        for key in ("c%2F1", "c%2F6", "nobody"):
            here, found = (client.get(f"/v1/features/d/{key}") for client in (http, there))
            assert (found.status_code, found.json()) == (here.status_code, here.json())
        here, found = (client.post("/v1/features/d/transform", json=ROWS) for client in (http, there))
        assert found.status_code == 200 and found.json() == here.json()
    database.close()


def test_newest_version_with_features_is_used_unless_another_is_requested(http: TestClient, make: Make) -> None:
    make(features=FEATURES)
    make(features={**FEATURES, "columns": {}})
    make(filter={"dedup": False}, clean={"fill": {"customer": "nobody"}}, features={"columns": FEATURES["columns"]})
    assert http.get("/v1/features/d/c/1", params={"version": 3}).json()["features"].keys() == {
        "spend.mean",
        "spend.max",
        "spend.count",
    }
    assert "age" in http.get("/v1/features/d/c/1", params={"version": 2}).json()["features"]
    newest = http.get("/v1/features/d/c/1")
    assert (newest.status_code, newest.json()["error_code"]) == (400, "INVALID_PARAMETER_VALUE")
    assert "d@4 have no `key`: POST rows to .../transform instead" in newest.json()["message"]
    assert http.post("/v1/features/d/transform", json=ROWS[:1]).json()["dataset"] == "d@4"


def test_invalid_feature_request_is_refused_with_the_reason(http: TestClient, make: Make) -> None:
    make(features=FEATURES)
    transform = "/v1/features/d/transform"
    for method, path, body, status, words in (
        ("GET", "/v1/features/d/nobody", None, 404, "no record of dataset d@2 has this key in 'customer'"),
        ("GET", "/v1/features/d/c/1?version=1", None, 404, "dataset d@1 has no features: ask for another version"),
        ("GET", "/v1/features/d/c/1?version=9", None, 404, "there is no dataset 'd@9'"),
        ("GET", "/v1/features/e/c", None, 404, "no version of a dataset 'e' has features: prepare one with a section"),
        ("POST", transform, [ROWS[0], {"age": "old"}], 400, "row 2: 'age' is not a number"),
        ("POST", transform, {"age": 1}, 400, "The request body must be a JSON list of rows"),
        ("POST", transform, [1], 400, "Invalid value 1"),
        ("POST", transform, [{}] * 1001, 400, "1000"),
    ):
        answer = http.request(method, path, json=body)
        assert answer.status_code == status and words in answer.json()["message"], (path, answer.text)
    unknown = http.post(transform, json=[{}]).json()["features"]
    expected = {"plan=free": 0, "plan=pro": 0, "age": None, "spend.mean": None, "spend.max": None, "spend.count": 0}
    assert unknown == [expected]


def test_features_of_another_organization_are_not_found(http: TestClient, make: Make, database: Database) -> None:
    make(features=FEATURES)
    with database.write() as connection:
        connection.execute(update(dataset_versions).values(organization="rival"))
    for answer in (http.get("/v1/features/d/c/1?version=2"), http.post("/v1/features/d/transform", json=[{}])):
        assert answer.status_code == 404, answer.text


def test_deleting_a_version_deletes_its_features(http: TestClient, make: Make, store: Store) -> None:
    version = make(features=FEATURES)
    assert len(store.list(f"{version.storage_path}features")) == 4
    assert http.get("/v1/features/d/c/1").status_code == 200
    assert http.delete(f"/v1/datasets/{version.id}").status_code == 200
    assert http.get("/v1/features/d/c/1").status_code == 404
    assert store.list(version.storage_path) == []


def test_feature_requests_are_audited_with_their_version(make: Make, settings: Settings, database: Database) -> None:
    version = make(features=FEATURES)
    app = create_app(settings)
    with asking(app) as client:
        assert [client.get(f"/v1/features/d/c/{n}").status_code for n in (1, 2, 99)] == [200, 200, 404]
        assert client.post("/v1/features/d/transform", json=ROWS[:3]).status_code == 200
    with database.read() as connection:
        calls = [event.payload for event in list_calls(connection, "default", limit=1000)]
    # Of this version alone: the application of other tests may write its pending counts now.
    one = [f"dataset:{version.id}"]
    asked = {(call["route"], call["status"]): call["count"] for call in calls if call["objects"] == one}
    assert asked == {
        ("/v1/features/{name}/{key:path}", 200): 2,
        ("/v1/features/{name}/{key:path}", 404): 1,
        ("/v1/features/{name}/transform", 200): 1,
    }


def test_missing_feature_files_answer_data_loss(http: TestClient, make: Make, store: Store) -> None:
    version = make(features=FEATURES)
    store.remove(f"{version.storage_path}features/online.jsonl")
    answer = http.get("/v1/features/d/c/1")
    assert (answer.status_code, answer.json()["error_code"]) == (409, "DATA_LOSS")


@pytest.mark.parametrize("name", ["online.jsonl", "online.index"])
def test_corrupt_feature_files_answer_data_loss_for_any_changed_byte(
    http: TestClient, make: Make, store: Store, name: str
) -> None:
    """Also in the index, where a wrong offset or none would be read."""
    version = make(features=FEATURES)
    place = f"{version.storage_path}features/{name}"
    whole = store.get_bytes(place)
    for changed in range(0, len(whole), max(1, len(whole) // 40)):
        store.put_bytes(place, whole[:changed] + bytes([whole[changed] ^ 1]) + whole[changed + 1 :])
        answer = http.get("/v1/features/d/c/1")
        assert (answer.status_code, answer.json()["error_code"]) == (409, "DATA_LOSS"), (changed, answer.text)


def test_preparation_with_unknown_or_conflicting_feature_columns_is_refused(http: TestClient, make: Make) -> None:
    version = make(features=FEATURES)
    raw = http.get("/v1/datasets").json()["datasets"][0]["id"]
    body = {"features": {"key": "custom", "columns": {"age": {"normalize": "standard"}}}}
    answer = http.post(f"/v1/datasets/{raw}/prepare", json=body)
    assert answer.status_code == 400
    assert "no record of dataset d@1 has the column 'custom' of features.key: it has age" in answer.json()["message"]
    again = http.post(f"/v1/datasets/{version.id}/prepare", json={"features": FEATURES})
    assert again.status_code == 400 and "d@2 has a column 'features'" in again.json()["message"]
    wrong = http.post(f"/v1/datasets/{raw}/prepare", json={"features": {"columns": {"age": {"normalize": "log"}}}})
    assert wrong.status_code == 400 and "features.columns.age.normalize" in wrong.json()["message"]
