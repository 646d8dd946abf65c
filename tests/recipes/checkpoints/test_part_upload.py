"""Upload of checkpoint parts: a crash at any point never makes one look complete."""

from pathlib import Path

import pytest

from recipes.checkpoints.commit import commit_checkpoint
from recipes.checkpoints.node_parts import (
    PART_KEY,
    PARTS_FOLDER,
    CheckpointPart,
    assemble_if_complete,
    join_parts,
    list_uploaded_parts,
    part_in_folder,
    upload_part,
)
from recipes.contracts.job import StoreAddress
from recipes.storage.artifact_store import MANIFEST_FILE, Store
from recipes.storage.manifest import FileRecord, Manifest

URI = "s3://hanzo-ml/checkpoints/run-1/6"
FIRST, SECOND = (CheckpointPart(number=number, of=2, save="a") for number in (1, 2))


class Killed(Exception):
    pass


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(StoreAddress(root=(tmp_path / "objects").as_uri(), buckets={"checkpoints": "c"}))


def put(store: Store, folder: Path, part: CheckpointPart) -> None:
    """Upload the part's only file and its record."""
    (scratch := folder / "scratch").mkdir(parents=True)
    (scratch / f"rows-{part.number}").write_text(str(part))
    commit_checkpoint(scratch, folder / "6", {PART_KEY: part.model_dump(mode="json")})
    upload_part(store, folder / "6", URI, Manifest.model_validate_json((folder / "6" / MANIFEST_FILE).read_bytes()), part)


def stops_at(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def stop(*given: object) -> None:
        raise Killed

    monkeypatch.setattr(Store, name, stop)


def test_part_without_all_files_does_not_count_as_uploaded(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the last node would complete a checkpoint that lacks files."""
    with monkeypatch.context() as killed, pytest.raises(Killed):
        stops_at(killed, "put_files")
        put(store, tmp_path / "first", FIRST)
    assert list_uploaded_parts(store, URI) == []
    put(store, tmp_path / "second", SECOND)
    assert not store.exists(f"{URI}/{MANIFEST_FILE}")


def test_part_records_remain_until_the_checkpoint_is_complete(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: after a kill in between, all parts were stored but had no record."""
    put(store, tmp_path / "first", FIRST)
    with monkeypatch.context() as killed, pytest.raises(Killed):
        stops_at(killed, "put_manifest")
        put(store, tmp_path / "second", SECOND)
    assert len(list_uploaded_parts(store, URI)) == 2
    assemble_if_complete(store, URI, FIRST)
    assert store.exists(f"{URI}/{MANIFEST_FILE}") and list_uploaded_parts(store, URI) == []
    place = store.local_path(f"{URI}/{PARTS_FOLDER}")
    assert place and not place.exists(), "its folder, too"


def test_invalid_and_vanished_part_manifests_are_skipped(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, tmp_path / "first", FIRST)
    store.put_bytes(f"{URI}/{PARTS_FOLDER}/2-of-2.json", b'{"kind": "half')
    there = store.list(f"{URI}/{PARTS_FOLDER}")
    assert len(there) == 2
    monkeypatch.setattr(Store, "list", lambda store, uri: [f"{URI}/{PARTS_FOLDER}/gone.json", *there])
    assert [manifest.facts[PART_KEY]["number"] for manifest in list_uploaded_parts(store, URI)] == [1]


def test_folder_with_corrupt_manifest_has_no_part(tmp_path: Path) -> None:
    """Regression: a corrupt manifest prevented the start; verification reports it like other corruption."""
    (tmp_path / MANIFEST_FILE).write_bytes(b'{"kind": "half')
    assert part_in_folder(tmp_path) is None
    assert part_in_folder(tmp_path / "none") is None


def test_joined_manifest_has_all_files_and_the_facts_of_first_part() -> None:
    """Files of fetched shares may occur in several parts."""

    def manifest(part: CheckpointPart, *names: str, **facts: int) -> Manifest:
        files = tuple(FileRecord(path=name, sha256=name, size=1) for name in names)
        return Manifest(kind="checkpoint", files=files, facts={PART_KEY: part.model_dump(mode="json"), **facts})

    second, first = manifest(SECOND, "d", "b", step=7), manifest(FIRST, "c", "b", "a", step=6)
    whole = join_parts([second, first], FIRST)
    assert whole == Manifest(kind="checkpoint", files=tuple(manifest(FIRST, *"abcd").files), facts={"step": 6})
    assert join_parts([second], SECOND) is None
    assert join_parts([second, manifest(FIRST.model_copy(update={"save": "b"}), "a")], SECOND) is None, "of two times"
