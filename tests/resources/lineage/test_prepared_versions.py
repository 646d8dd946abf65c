"""Lineage of prepared versions through their own splits: derivation, drift and deletion."""

from pathlib import Path

import pytest
from sqlalchemy import update

from recipes.contracts.validation_results import ValidationFacts, Violations
from recipes.storage.manifest import Artifact
from resources.datasets.deletion import delete_version
from resources.datasets.validations import Validations
from resources.errors import HanzoError
from resources.lineage.dataset_lineage import read_lineage, version_digests
from resources.lineage.model_ancestry import Ancestry
from resources.lineage.proof import prove_version
from resources.lineage.trace import walk_nodes
from resources.metadata.datasets import DatasetVersion
from resources.metadata.registry.model_names import ModelKey
from resources.metadata.tables import model_versions
from tests.recipes.preparation.preparation_workspace import questions
from tests.support.resources.lineage import SPLITS, World, small
from tests.support.resources.prepared_lineage import prepared

__all__ = ["small"]


def trained_on(world: World, version: DatasetVersion) -> None:
    world.model("m", "r1", world.run("r1", version, {split: version.split(split) for split in SPLITS}))


def checked(world: World, version: DatasetVersion) -> Artifact:
    """Return a version with statistics, whose content is irrelevant here."""
    statistics = Artifact(kind="statistics", uri=f"{version.storage_path}statistics", digest="0" * 64, size_bytes=1)
    with world.database.write() as connection:
        facts = ValidationFacts(violations=Violations())
        Validations(world.database).set_version(connection, version, statistics, facts, [])
    return statistics


def test_deleting_one_of_two_equal_prepared_versions_keeps_models_of_the_other_proved(small: World) -> None:
    source = small.create(questions(40), "raw")
    first, _ = prepared(small, source, "first")
    second, _ = prepared(small, source, "second")
    assert first.content_sha256 == second.content_sha256
    assert not set(version_digests(first)) & set(version_digests(second))
    trained_on(small, second)
    delete_version(small.database, small.store, first.id, "u")
    with small.database.read() as connection:
        found = prove_version(connection, small.store, small.registry.read(ModelKey("default", "m"), 1), lambda _: None)
    assert (found.ok, found.broken) == (True, [])
    traced = walk_nodes(small.trace(questions(40)[3]).reached)
    assert {node.name for node in traced if node.kind in ("dataset version", "run")} == {"raw@1", "second@1", "r1"}


def test_runs_and_models_are_descendants_of_a_prepared_version_and_prevent_deletion(small: World) -> None:
    version, _ = prepared(small, small.create(questions(40), "raw"), "ready")
    trained_on(small, version)
    with small.database.read() as connection:
        found = read_lineage(connection, version)
    assert [made.name for made in found.made_into if made.kind == "run"] == ["run r1"]
    assert sorted(made.kind for made in found.made_into) == ["gguf", "merged", "run"]
    with pytest.raises(HanzoError, match=r"dataset ready@1 is not deleted: .*run r1"):
        delete_version(small.database, small.store, version.id, "u")
    assert small.store.fetch(version.artifact, Path(small.folder) / "cache").is_dir()


def test_drift_is_measured_against_the_prepared_version_of_the_production_model(small: World) -> None:
    """Regression: compared with its unprepared parent, every column seemed to have drifted."""
    source = small.create(questions(40))
    version, _ = prepared(small, source, "d")
    trained_on(small, version)
    with small.database.write() as connection:
        connection.execute(update(model_versions).values(stage="production"))
    later = small.create(questions(50, seed=2))
    statistics = checked(small, version)
    for other in (source, later):
        checked(small, other)
    newest = small.create(questions(60, seed=3))
    with small.database.read() as connection:
        ancestry = Ancestry(connection, small.database, newest)
        baseline, names = ancestry.baseline(), set(ancestry.training_records())
    assert baseline == (version.reference, statistics)
    assert names == {f"{version.reference} train, of m@1"}


def test_training_records_of_all_ancestors_are_excluded_from_testing(small: World) -> None:
    raw = small.create(questions(40), "raw")
    trained = small.split(raw)["train"]
    ready, _ = prepared(small, raw, "ready")
    again, _ = prepared(small, ready, "again", augment={"mask_pii": False, "shuffle_seed": 1})
    with small.database.read() as connection:
        found = Ancestry(connection, small.database, again).training_records()
    assert found == {"ready@1 train": ready.split("train"), "raw@1 train": trained}
