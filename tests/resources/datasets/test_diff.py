"""Version diff, with and without a key, and lineage in both directions."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recipes.contracts.dataset_formats import Format
from resources.datasets.diff import diff_versions
from resources.errors import HanzoError
from resources.ingest.new_version import NewVersion
from resources.ingest.source_files import local_files
from resources.ingest.version_creation import create_from_files
from resources.lineage.dataset_lineage import read_lineage
from resources.lineage.edges import record_artifact
from resources.metadata.datasets import Datasets, DatasetVersion
from tests.support.resources.dataset_versions import Place

Make = Callable[..., DatasetVersion]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def make(place: Place) -> Make:
    def make(*rows: dict[str, Any], name: str = "d") -> DatasetVersion:
        return place.create("".join(json.dumps(row) + "\n" for row in rows), name)[0]

    return make


def row(number: int, text: str = "") -> dict[str, Any]:
    return {"id": number, "text": text or f"text {number}"}


def test_diff_without_a_key_counts_added_and_removed_records_with_multiplicity(place: Place, make: Make) -> None:
    old = make(row(1), row(2), row(2), row(3))
    new = make(row(3), row(2), row(4), row(4), row(5))
    found = diff_versions(place.store, old, new)
    assert (found.added, found.removed, found.changed, found.unchanged) == (3, 2, None, 2)
    assert found.examples == {"added": [row(4), row(4), row(5)], "removed": [row(1), row(2)]}


def test_diff_with_a_key_counts_changed_records(place: Place, make: Make) -> None:
    old = make(row(1), row(2), row(3), row(4))
    new = make(row(4), row(2, "other"), row(3), row(5))
    found = diff_versions(place.store, old, new, "id")
    assert (found.added, found.removed, found.changed, found.unchanged) == (1, 1, 1, 2)
    assert found.examples == {"added": [row(5)], "removed": [row(1)], "changed": [row(2, "other")]}


def test_the_schemas_and_the_statistics_are_compared(place: Place, make: Make) -> None:
    found = diff_versions(place.store, make({"a": 1, "b": 1}), make({"a": "x", "c": None}))
    assert (found.schema_added, found.schema_removed) == ({"c": "null"}, {"b": "integer"})
    assert found.schema_changed == {"a": ("integer", "string")}
    assert (found.old.num_records, found.old.columns) == (1, {"a": {"integer": 1}, "b": {"integer": 1}})


def test_diff_counts_columns_of_a_version_without_statistics(place: Place, make: Make) -> None:
    """Prepared versions have no statistics: only created ones store them in their manifest."""
    old, files = make(row(1), row(2)), place.folder / "files"
    files.mkdir()
    (files / "a.jsonl").write_text('{"id":1,"text":"text 1"}\n{"id":"2"}\n')
    new = replace(old, artifact=place.store.publish(files, "s3://hanzo-ml/datasets/d/prepared/all", "dataset"))
    for key in (None, "id"):
        found = diff_versions(place.store, old, new, key)
        assert found.old.columns == {"id": {"integer": 2}, "text": {"string": 2}}
        assert found.new.columns == {"id": {"integer": 1, "string": 1}, "text": {"string": 1}}


@pytest.mark.parametrize(
    ("key", "reason"),
    [("nothing", "record 1 of d@1 has no 'nothing'"), ("text", "'text' of 1 record of d@1 is that of another")],
)
def test_invalid_key_is_refused(place: Place, make: Make, key: str, reason: str) -> None:
    old = make(row(1, "same"), row(2, "same"))
    with pytest.raises(HanzoError, match=reason):
        diff_versions(place.store, old, make(row(3)), key)


def test_diff_of_a_version_with_itself_is_empty(place: Place, make: Make) -> None:
    version = make(*map(row, range(50)))
    for key in (None, "id"):
        found = diff_versions(place.store, version, version, key)
        assert (found.added, found.removed, found.unchanged) == (0, 0, 50)


def test_lineage_lists_ancestors_and_descendants_of_a_version(place: Place, make: Make, tmp_path: Path) -> None:
    version = make(row(1))
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "file").write_text("x")

    def publish(uri: str, kind: str, **inputs: str) -> str:
        artifact = place.store.publish(tmp_path / "made", uri, kind, inputs=inputs)
        with place.database.write() as connection:
            record_artifact(connection, artifact, place.store.manifest(artifact))
        return artifact.digest

    split = publish(f"{version.storage_path}splits/x/train", "split", dataset=version.artifact.digest)
    run = publish("s3://hanzo-ml/runs/r1/record", "run", train=split)
    publish("s3://hanzo-models/m/v1/gguf", "gguf", adapter=run)
    path = tmp_path / "child.jsonl"
    path.write_text('{"a": 1}\n')
    child = NewVersion("child", "jsonl", "u", "default", transform="cut", parents=[version.reference])
    create_from_files(place.database, place.store, child, local_files(path, Format.JSONL))
    with place.database.read() as connection:
        found = read_lineage(connection, version)
        below = read_lineage(connection, Datasets(place.database).resolve("child", "default", connection))
    assert [each.kind for each in found.made_from] == ["source"]
    assert found.children == ["child@1"]
    assert [each.name for each in found.made_into] == [
        f"split at {version.storage_path}splits/x/train",
        "run r1",
        "gguf at s3://hanzo-models/m/v1/gguf",
    ]
    assert (below.parents, below.transform) == (["d@1"], "cut")


@pytest.mark.requirement("B3", "B8")
def test_versions_are_listed_in_pages_by_name_and_tags(place: Place, make: Make) -> None:
    made = [make(row(number), name=f"n{number % 2}") for number in range(5)]
    datasets = Datasets(place.database)
    for version in made[:3]:
        datasets.describe(version.id, tags=["a", "é'\""])
    pages: list[list[str]] = []
    token = None
    while not pages or token:
        found, token = datasets.page("default", limit=2, page_token=token)
        pages.append([version.reference for version in found])
    assert pages == [["n0@1", "n0@2"], ["n0@3", "n1@1"], ["n1@2"]]
    assert [version.reference for version in datasets.list("default", tags=["é'\"", "a"])] == ["n0@1", "n0@2", "n1@1"]
    assert [version.reference for version in datasets.list("default", "n1", ["a"])] == ["n1@1"]
    assert datasets.list("default", tags=["a", "b"]) == datasets.list("other") == []
