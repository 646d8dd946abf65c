"""Prepared versions: created once, with parents, transform, splits and completion of the job."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
from sqlalchemy import update

from recipes.contracts.job import Result, StoreAddress
from recipes.contracts.parameters import PrepareParameters
from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Artifact
from resources.datasets.deletion import delete_version
from resources.datasets.prepared_versions import Derivation, add_prepared_version, prepared_schema
from resources.errors import HanzoError
from resources.ingest.version_creation import create_version
from resources.lineage.edges import find_artifact, parent_digests, record_artifact
from resources.metadata.database import Database
from resources.metadata.datasets import Datasets, DatasetVersion, lock_for_deletion, lock_for_derivation
from resources.metadata.jobs import PREPARATION, Jobs
from resources.metadata.outbox import read_after
from resources.metadata.tables import dataset_holders
from resources.object_store.chunk_claims import ChunkClaims
from tests.resources.metadata.conftest import database, database_url, migrated_sqlite, postgres, postgres_url, sqlite_url
from tests.support.postgres_server import until_one_waits

__all__ = ["database", "database_url", "migrated_sqlite", "postgres", "postgres_url", "sqlite_url"]

PLACE = "s3://hanzo-ml/datasets/d/prepared-d-1-x"
OTHER_PLACE = "s3://hanzo-ml/datasets/d/prepared-d-1-y"
PARAMETERS = PrepareParameters()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    yield Store(StoreAddress(root=(tmp_path / "objects").as_uri(), buckets={"datasets": "d", "checkpoints": "c"}))


@pytest.fixture
def parent(database: Database, store: Store, tmp_path: Path) -> DatasetVersion:
    return source(database, store, tmp_path)


def source(database: Database, store: Store, tmp_path: Path) -> DatasetVersion:
    raw = tmp_path / "raw.jsonl"
    raw.write_text('{"instruction": "Who?", "answer": "She."}\n')
    version, _ = create_version(database, store, name="d", path=raw, user="u", organization="default")
    return version


def prepared(store: Store, parent: DatasetVersion, folder: Path, text: str, place: str = PLACE) -> Result:
    """Write a small result as the preparation program does."""
    artifacts: dict[str, Artifact] = {}
    for role in ("dataset", "train", "validation", "test", "rejected"):
        content = folder / text / role
        content.mkdir(parents=True)
        (content / f"{role}.jsonl").write_text(f"{text}\n")
        uri = f"{place}-{text}/all/records" if role == "dataset" else f"{place}-{text}/{role}"
        artifacts[role] = store.publish(content, uri, role, inputs={"dataset": parent.artifact.digest}, facts={"of": text})
    return Result(
        work_digest="0" * 64,
        artifacts=artifacts,
        metrics={"train": 8.0, "validation": 1.0, "test": 1.0},
        facts={
            "rejected": {"duplicate": 2},
            "masked": {},
            "oversampled": {},
            "leaked": 0,
            "truncated": 3,
            "content_sha256": text * 64,
        },
    )


@pytest.mark.requirement("C4")
def test_prepared_version_has_parents_transform_and_splits(
    database: Database, store: Store, parent: DatasetVersion, tmp_path: Path
) -> None:
    result = prepared(store, parent, tmp_path, "a")
    version, is_new = add_prepared_version(database, store, Derivation(parent, "d", PARAMETERS, "ann"), result)
    assert is_new
    assert Datasets(database).read("d@2", "default") == version
    assert version.lineage["parent_datasets"] == ["d@1"]
    assert PrepareParameters.model_validate(version.lineage["transform"]) == PARAMETERS
    assert version.split("train") == result.artifacts["train"]
    assert version.num_records == 10
    assert version.metadata == {key: value for key, value in result.facts.items() if key != "content_sha256"}
    with database.read() as connection:
        assert parent_digests(connection, version.split("test").digest) == {"dataset": parent.artifact.digest}


@pytest.mark.parametrize(
    ("before", "after"),
    [("integer", "integer|string"), ("integer?", "integer|string?"), ("integer|null", "integer|null|string")],
)
def test_masked_number_is_a_string_in_the_schema(before: str, after: str) -> None:
    made = prepared_schema({"card": before, "text": "string"}, PARAMETERS, {"retyped": ["card"]})
    assert made == {"card": after, "text": "string"}
    assert prepared_schema({"card": before}, PARAMETERS, {}) == {"card": before}, "of a result of an earlier release"


def test_equal_prepared_content_creates_no_second_version(
    database: Database, store: Store, parent: DatasetVersion, tmp_path: Path
) -> None:
    derivation = Derivation(parent, "d", PARAMETERS, "ann")
    result = prepared(store, parent, tmp_path, "a")
    first, _ = add_prepared_version(database, store, derivation, result)
    again, is_new = add_prepared_version(database, store, derivation, result)
    other, other_is_new = add_prepared_version(database, store, derivation, prepared(store, parent, tmp_path, "b"))
    assert (again.id, is_new) == (first.id, False)
    assert (other.version, other_is_new) == (3, True)


def test_deleting_one_of_two_versions_with_equal_digest_keeps_the_lineage_of_the_other(
    database: Database, store: Store, parent: DatasetVersion, tmp_path: Path
) -> None:
    """Before manifests stored their location, two names could be prepared with the same digest."""
    made = []
    for name in ("d", "other"):
        place = f"s3://hanzo-ml/datasets/{name}/prepared-d-1-x"
        result = prepared(store, parent, tmp_path / name, "a", place)
        made.append(add_prepared_version(database, store, Derivation(parent, name, PARAMETERS, "ann"), result)[0])
    first, second = made
    assert first.artifact.digest == second.artifact.digest
    run = tmp_path / "run"
    run.mkdir()
    trained = store.publish(run, "s3://hanzo-ml/runs/r1/record", "run", inputs={"train": second.split("train").digest})
    with database.write() as connection:
        record_artifact(connection, trained, store.manifest(trained))
    delete_version(database, store, first.id, "ann")
    with database.read() as connection:
        for kept in (second.artifact, *(second.split(split) for split in second.splits)):
            assert find_artifact(connection, kept.digest) == kept
            assert parent_digests(connection, kept.digest) == {"dataset": parent.artifact.digest}
    with pytest.raises(HanzoError, match="other@1 is not deleted: run r1"):
        delete_version(database, store, second.id, "ann")


def test_duplicate_preparation_is_removed_and_its_job_gets_the_existing_version(
    database: Database, store: Store, parent: DatasetVersion, tmp_path: Path
) -> None:
    jobs, derivation = Jobs(database), Derivation(parent, "d", PARAMETERS, "ann")
    first, _ = add_prepared_version(database, store, derivation, prepared(store, parent, tmp_path, "a"))
    asked = jobs.submit(name="p", config={}, user="ann", organization="default", type=PREPARATION)
    jobs.start(asked.id)
    before = store.list("s3://hanzo-ml/datasets/")
    result = prepared(store, parent, tmp_path / "again", "a", OTHER_PLACE)
    assert len(store.list("s3://hanzo-ml/datasets/")) > len(before)
    found, is_new = add_prepared_version(database, store, derivation, result, asked)
    assert (found, is_new) == (first, False)
    assert store.list("s3://hanzo-ml/datasets/") == before
    job = jobs.read(asked.id)
    assert (job.artifact("dataset"), job.artifact("train")) == (first.artifact, first.split("train"))
    again, _ = add_prepared_version(database, store, derivation, prepared(store, parent, tmp_path / "once more", "a"))
    assert again == first and store.fetch(first.artifact, tmp_path / "cache").is_dir(), "it lies there itself"


def test_version_is_not_created_from_files_being_removed(
    database: Database, store: Store, parent: DatasetVersion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two identical preparations race with a deletion.

    The first found that the version existed already; the second, that it no longer did.
    """
    derivation = Derivation(parent, "d", PARAMETERS, "ann")
    first, _ = add_prepared_version(database, store, derivation, prepared(store, parent, tmp_path, "a"))
    result = prepared(store, parent, tmp_path / "again", "a", OTHER_PLACE)
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(ChunkClaims, "release", Mock(side_effect=KeyboardInterrupt))
        add_prepared_version(database, store, derivation, result)
    delete_version(database, store, first.id, "ann")
    with pytest.raises(HanzoError, match="being deleted"):
        add_prepared_version(database, store, derivation, result)
    ChunkClaims(database, "default", "s3://hanzo-ml/datasets/d").finish_deletion(store, f"{OTHER_PLACE}-a/")
    assert store.find(result.artifacts["train"].uri) is None


def test_preparation_job_completes_in_the_transaction_of_its_version(
    database: Database, store: Store, parent: DatasetVersion, tmp_path: Path
) -> None:
    jobs = Jobs(database)
    asked = jobs.submit(name="p", config={}, user="ann", organization="default", type=PREPARATION)
    jobs.start(asked.id)
    derivation = Derivation(parent, "other", PARAMETERS, "ann")
    version, _ = add_prepared_version(database, store, derivation, prepared(store, parent, tmp_path, "a"), asked)
    assert version.reference == "other@1"
    assert jobs.read(asked.id).status == "completed"
    assert jobs.read(asked.id).artifact("dataset") == version.artifact
    with database.read() as connection:
        types = [event.type for event in read_after(connection, 0, ("job.completed", "dataset.created"), 10)]
    assert types == ["dataset.created", "dataset.created", "job.completed"]


def test_version_is_not_created_where_another_is_being_deleted(
    database: Database, store: Store, parent: DatasetVersion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a deletion killed before removing its files removed the new version's a day later."""
    derivation = Derivation(parent, "d", PARAMETERS, "ann")
    result = prepared(store, parent, tmp_path, "a")
    first, _ = add_prepared_version(database, store, derivation, result)
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(ChunkClaims, "release", Mock(side_effect=KeyboardInterrupt))
        delete_version(database, store, first.id, "ann")
    with pytest.raises(HanzoError, match="being deleted"):
        add_prepared_version(database, store, derivation, result)
    claims = ChunkClaims(database, "default", "s3://hanzo-ml/datasets/d")
    claims.finish_deletion(store, first.storage_path)
    assert store.find(result.artifacts["train"].uri) is None
    second, is_new = add_prepared_version(database, store, derivation, prepared(store, parent, tmp_path / "again", "a"))
    assert is_new and second.storage_path == first.storage_path
    with database.write() as connection:
        connection.execute(update(dataset_holders).values(updated_at=1))
    claims.release_abandoned(store)
    assert store.fetch(second.artifact, tmp_path / "cache").is_dir()


@pytest.mark.parametrize("taken", ["all", "all/records/manifest.json", "train/train.jsonl"])
def test_version_is_not_created_from_files_removed_by_a_deletion(
    database: Database, store: Store, parent: DatasetVersion, tmp_path: Path, taken: str
) -> None:
    """A preparation reuses or repeats an equal one whose version is deleted meanwhile."""
    derivation = Derivation(parent, "d", PARAMETERS, "ann")
    result = prepared(store, parent, tmp_path, "a")
    first, _ = add_prepared_version(database, store, derivation, result)
    delete_version(database, store, first.id, "ann")
    if taken != "all":
        prepared(store, parent, tmp_path / "meanwhile", "a")
        store.remove(f"{PLACE}-a/{taken}")
    with pytest.raises(HanzoError, match="was just deleted: try again"):
        add_prepared_version(database, store, derivation, result)
    assert [version.reference for version in Datasets(database).list("default")] == ["d@1"]
    assert store.list(PLACE + "-a") == [], "or who asks again would find the work done, and be refused again"
    again, is_new = add_prepared_version(database, store, derivation, prepared(store, parent, tmp_path / "again", "a"))
    assert is_new and store.fetch(again.artifact, tmp_path / "cache").is_dir()


def test_delayed_deletion_removes_no_file_of_a_version_recreated_in_its_place(
    database: Database, store: Store, parent: DatasetVersion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deletion stalls after listing files, the next preparation completes it, then it resumes."""
    derivation = Derivation(parent, "d", PARAMETERS, "ann")
    first, _ = add_prepared_version(database, store, derivation, prepared(store, parent, tmp_path, "a"))
    real = Store.list
    made = []

    def stands_still(of: Store, uri: str) -> list[str]:
        """List the files, then run the concurrent operations."""
        found = real(of, uri)
        if uri == first.storage_path and not made:
            made.append(None)
            claims = ChunkClaims(database, "default", "s3://hanzo-ml/datasets/d")
            claims.finish_deletion(store, first.storage_path)
            made[0] = add_prepared_version(database, store, derivation, prepared(store, parent, tmp_path / "again", "a"))[0]
        return found

    with monkeypatch.context() as slow:
        slow.setattr(Store, "list", stands_still)
        delete_version(database, store, first.id, "ann")
    (second,) = made
    assert second is not None and second.storage_path == first.storage_path
    assert store.fetch(second.artifact, tmp_path / "cache").is_dir()


def test_preparation_of_a_deleted_version_is_refused_and_its_files_are_removed(
    database: Database, store: Store, parent: DatasetVersion, tmp_path: Path
) -> None:
    """No queued job names it: the asset was materialized by hand."""
    result = prepared(store, parent, tmp_path, "a")
    delete_version(database, store, parent.id, "ann")
    with pytest.raises(HanzoError, match="d@1 was deleted while it was prepared"):
        add_prepared_version(database, store, Derivation(parent, "d", PARAMETERS, "ann"), result)
    assert Datasets(database).list("default") == []
    assert store.list("s3://hanzo-ml/datasets/") == []


@pytest.mark.parametrize("kind", ["postgresql"])
def test_deletion_waits_for_a_concurrent_derivation(postgres_url: str, store: Store, tmp_path: Path, kind: str) -> None:
    database = Database(postgres_url)
    version = source(database, store, tmp_path)
    artifact = prepared(store, version, tmp_path, "a").artifacts["dataset"]
    with ThreadPoolExecutor(1) as pool:
        with database.write() as connection:
            assert lock_for_derivation(connection, version.id)
            deleted = pool.submit(delete_version, database, store, version.id, "ann")
            until_one_waits(postgres_url)
            record_artifact(connection, artifact, store.manifest(artifact))
        with pytest.raises(HanzoError, match="d@1 is not deleted"):
            deleted.result()


@pytest.mark.parametrize("kind", ["postgresql"])
def test_derivation_waits_for_a_concurrent_deletion(postgres_url: str, store: Store, tmp_path: Path, kind: str) -> None:
    database = Database(postgres_url)
    version = source(database, store, tmp_path)
    result = prepared(store, version, tmp_path, "a")
    with ThreadPoolExecutor(1) as pool:
        with database.write() as connection:
            lock_for_deletion(connection, version.id)
            made = pool.submit(add_prepared_version, database, store, Derivation(version, "d", PARAMETERS, "ann"), result)
            until_one_waits(postgres_url)
            Datasets(database).remove(connection, version, "ann")
        with pytest.raises(HanzoError, match="d@1 was deleted"):
            made.result()
