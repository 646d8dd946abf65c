"""A line selection reads as a file of complete ordered lines; corruption is reported."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.contracts.job import StoreAddress
from recipes.storage.artifact_store import BrokenArtifact, Store
from recipes.storage.line_selection import (
    bitmap_uri,
    iterate_line_batches,
    origin_uri,
    pack_bitmap,
    select_lines,
    unpack_bitmap,
)
from recipes.storage.manifest import FileRecord, LineSelection, Manifest

LINES = [b"one\n", b"two\n", b"three\n", b"four\n"]


@given(
    st.lists(st.tuples(st.sampled_from([b"", b" \t", b"a", b"\r", b"long" * 9]), st.booleans())), st.booleans(), st.data()
)
def test_selected_lines_are_independent_of_chunk_boundaries(
    drawn: list[tuple[bytes, bool]], ends: bool, data: st.DataObject
) -> None:
    text = b"\n".join(line for line, _ in drawn) + (b"\n" if ends else b"")
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    kept = [(line + b"\n", mark) for line, mark in drawn if line.strip()]
    assert [line for lines in iterate_line_batches(pieces) for line in lines] == [line for line, _ in kept]
    marks = np.array([mark for _, mark in kept], np.bool_)
    assert b"".join(select_lines(pieces, marks)) == b"".join(line for line, mark in kept if mark)
    assert (unpack_bitmap(pack_bitmap(marks), len(marks)) == marks).all()


class Place:
    """A dataset of two files, and an artifact with two lines of the second."""

    def __init__(self, folder: Path) -> None:
        buckets = {kind: f"hanzo-{kind}" for kind in ("datasets", "checkpoints", "models")}
        self.store = Store(StoreAddress(root=(folder / "objects").as_uri(), buckets=buckets))
        raw = folder / "raw"
        raw.mkdir()
        (raw / "a.jsonl").write_bytes(b"another\n")
        (raw / "b.jsonl").write_bytes(b"".join(LINES))
        self.source = self.store.publish(raw, "s3://hanzo-ml/datasets/d/1/records", "dataset")
        self.uri = "s3://hanzo-ml/datasets/d/1/splits/x/test"
        self.bitmap = pack_bitmap(np.array([False, True, False, True]))
        self.store.put_bytes(bitmap_uri(self.uri, "test.jsonl"), self.bitmap)
        self.store.put_bytes(origin_uri(self.uri), self.source.uri.encode())
        sha256 = hashlib.sha256(self.bitmap).hexdigest()
        selection = LineSelection(of=self.source.digest, path="b.jsonl", before=1, records=4, chosen=2, sha256=sha256)
        bytes_of_it = LINES[1] + LINES[3]
        sha256 = hashlib.sha256(bytes_of_it).hexdigest()
        file = FileRecord(path="test.jsonl", sha256=sha256, size=len(bytes_of_it), selection=selection)
        self.artifact = self.store.put_manifest(self.uri, Manifest(kind="split", files=(file,)))


def test_line_selection_artifact_is_assembled_on_fetch(tmp_path: Path) -> None:
    place = Place(tmp_path)
    folder = place.store.fetch(place.artifact, tmp_path / "cache")
    assert [path.name for path in folder.iterdir()] == ["test.jsonl"]
    assert (folder / "test.jsonl").read_bytes() == LINES[1] + LINES[3]
    assert place.artifact.size_bytes == 9
    (folder / "test.jsonl").write_bytes(b"what a script left")
    assert (place.store.fetch(place.artifact, tmp_path / "cache") / "test.jsonl").read_bytes() == LINES[1] + LINES[3]


def test_corrupt_selection_part_is_refused_by_name(tmp_path: Path) -> None:
    place = Place(tmp_path)
    store, bitmap = place.store, bitmap_uri(place.uri, "test.jsonl")

    def refusal() -> str:
        with pytest.raises(BrokenArtifact) as refused:
            store.fetch(place.artifact, tmp_path / "cache")
        return str(refused.value)

    store.put_bytes(bitmap, b"\xff")
    assert f"{bitmap} has SHA-256" in refusal()
    store.remove(bitmap)
    assert bitmap in refusal()
    store.put_bytes(bitmap, place.bitmap)
    uri = place.source.uri.encode()
    for place_of_bit in range(8 * len(uri)):  # for every flipped bit
        flipped = bytearray(uri)
        flipped[place_of_bit // 8] ^= 1 << place_of_bit % 8
        store.put_bytes(origin_uri(place.uri), bytes(flipped))
        assert f"{origin_uri(place.uri)} does not lead to artifact {place.source.digest}" in refusal()
    store.put_bytes(origin_uri(place.uri), uri)
    store.put_bytes(f"{place.source.uri}/b.jsonl", b"one\nTWO\nthree\nfour\n")
    assert "test.jsonl has SHA-256" in refusal()
    store.remove(f"{place.source.uri}/b.jsonl")
    assert f"{place.source.uri}/b.jsonl" in refusal()


def test_line_selection_digest_is_independent_of_source_location(tmp_path: Path) -> None:
    """The location of the source is not part of the content."""
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    here, there = Place(tmp_path / "here"), Place(tmp_path / "there")
    moved = here.source.model_copy(update={"uri": "s3://hanzo-ml/datasets/d/7/records"})
    for name in ("a.jsonl", "b.jsonl", "manifest.json"):
        there.store.put_bytes(f"{moved.uri}/{name}", there.store.get_bytes(f"{there.source.uri}/{name}"))
    there.store.delete(there.source.uri)
    there.store.put_bytes(origin_uri(there.uri), moved.uri.encode())
    assert there.artifact.digest == here.artifact.digest
    folder = there.store.fetch(there.artifact, tmp_path / "cache")
    assert (folder / "test.jsonl").read_bytes() == LINES[1] + LINES[3]


def test_file_record_without_line_selection_omits_its_key() -> None:
    """Otherwise all existing digests would change."""
    file = FileRecord(path="a", sha256="0" * 64, size=1)
    assert file.model_dump(mode="json") == {"path": "a", "sha256": "0" * 64, "size": 1}
