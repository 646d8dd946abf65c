"""Splits in the object store (folder or S3): size, proof and deletion."""

import os
from pathlib import Path
from unittest import mock

from recipes.contracts.job import Job, Program
from recipes.contracts.validation_results import ValidationFacts
from recipes.records.record_reader import iterate_record_lines
from recipes.storage.artifact_store import Store
from recipes.storage.line_selection import bitmap_uri, origin_uri
from recipes.storage.locations import chunk_uri
from recipes.validate import validate
from resources.datasets.deletion import delete_version
from resources.lineage.proof import Prover
from resources.metadata.database import Database
from tests.resources.metadata.conftest import database, database_url, migrated_sqlite, postgres, postgres_url, sqlite_url
from tests.support.resources.splits import divided
from tests.support.resources.stored_versions import ALL, corpus, create, in_folder, store, stored
from tests.support.s3_server import VARIABLES

__all__ = ["database", "database_url", "migrated_sqlite", "postgres", "postgres_url", "sqlite_url", "store"]


def test_splits_take_little_space_and_are_deleted_with_their_version(
    database: Database, store: Store, tmp_path: Path
) -> None:
    lines = corpus(3_000_000)
    made = []
    for edition in range(2):
        lines[edition] = corpus(1000, seed=edition + 1)[0]
        version, _ = create(database, store, tmp_path, "".join(lines))
        before = stored(store)
        splits = divided(database, store, tmp_path, version)
        # Each has a manifest and a pointer of constant size, and one bit for each of the 3,400 records.
        assert stored(store) - before < 3 * (1500 + len(lines) / 8)
        held = [line for artifact in splits.values() for line in iterate_record_lines(store, artifact)]
        assert sorted(held) == sorted(iterate_record_lines(store, version.artifact))
        assert sum(artifact.size_bytes for artifact in splits.values()) == sum(map(len, held))
        made.append(version)
    with database.read() as connection:
        prover = Prover(connection, store)
        prover.artifact(splits["train"], "run")
    assert prover.broken == []
    for version in made:
        delete_version(database, store, version.id, "u")
    assert store.list(ALL) == []


def test_version_is_validated_in_place(database: Database, store: Store, tmp_path: Path) -> None:
    lines = corpus(3_000_000)
    version, _ = create(database, store, tmp_path, "".join(lines))
    place = f"{version.storage_path}validate/x"
    job = Job(
        id="validate",
        program=Program.VALIDATE,
        inputs={"dataset": version.artifact},
        parameters={"contract": {"columns": {"id": {"type": "integer", "maximum": len(lines) - 2}}}},
        outputs={"statistics": f"{place}/statistics"},
        result_uri=f"{place}/result.json",
        store=store.address,
        work_dir=str(tmp_path / "work"),
        cache_dir=str(tmp_path / "cache"),
    )
    (tmp_path / "work").mkdir()
    with mock.patch.dict(os.environ, VARIABLES):
        facts = ValidationFacts.model_validate(validate(job, store, tmp_path / "work").facts)
    assert [each.line for each in facts.violations.first] == [len(lines)]
    assert not (tmp_path / "cache").exists()


def test_the_proof_names_the_split_whose_bitmap_or_version_is_broken(sqlite_url: str, tmp_path: Path) -> None:
    database, store = Database(sqlite_url), in_folder(tmp_path)
    version, _ = create(database, store, tmp_path, "".join(corpus(100_000)))
    split = divided(database, store, tmp_path, version)["train"]

    def broken() -> list[str]:
        with database.read() as connection:
            prover = Prover(connection, store)
            prover.artifact(split, "run", "train")
            return prover.broken

    assert broken() == []
    name = store.manifest(split).files[0].path
    assert (store.fetch(split, tmp_path / "cache", [name]) / name).stat().st_size == split.size_bytes
    bitmap = bitmap_uri(split.uri, name)
    whole = store.get_bytes(bitmap)
    store.put_bytes(bitmap, whole[:-1])
    (edge,) = broken()
    assert edge.startswith("run -> train split: ") and bitmap in edge
    store.put_bytes(bitmap, whole)
    origin = store.get_bytes(origin_uri(split.uri))
    store.put_bytes(origin_uri(split.uri), b"\xff\xfe")
    assert broken()[0].startswith("run -> train split: ")
    store.put_bytes(origin_uri(split.uri), origin)
    chunk = store.manifest(version.artifact).files[0].chunks[0].sha256
    store.remove(chunk_uri(version.artifact.uri, chunk))
    of_split, of_version = broken()
    assert of_split.startswith("run -> train split: ") and chunk in of_split
    assert of_version.startswith("train split -> dataset version: ") and chunk in of_version
