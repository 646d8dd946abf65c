"""Publishing the parts of all pods: building the index takes constant memory."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from recipes.contracts.parameters import PrepareParameters
from recipes.preparation.plan import Plan, atomic_path
from recipes.preparation.publishing import DATASET_ROLE, VersionPublisher, delivery_marker, hashes_file
from recipes.preparation.split_assignment import SPLITS
from recipes.preparation.workers import Pods
from recipes.records import record_index
from recipes.records.record_index import IndexHit, find_index, fingerprint_line, number_hits
from recipes.records.record_reader import iterate_record_lines
from recipes.storage.manifest import FileRecord, Manifest
from tests.recipes.preparation.preparation_workspace import Place, questions
from tests.support.recipes.mixed_records import SMALL

RECORDS = 5_000
"""Records per part."""


def delivery(folder: Path, parts: int) -> tuple[Place, VersionPublisher]:
    """Deliver parts whose record hashes identify the records.

    Records are numbered in the order of the file names. For record n the hash of its text is n, its own hash n + 1,
    and the hash of its origin n + 2.
    """
    place = Place(folder, [])
    plan = Plan(work=folder / "work", ranges=(), parameters=PrepareParameters())
    counts = (parts, 1, 1)
    for number in range(parts + 2):
        # Training parts are delivered first; by name the test part is first.
        numbers = np.arange(RECORDS, dtype=np.uint64) + np.uint64((number + 1) % (parts + 2) * RECORDS)
        with atomic_path(hashes_file(plan, counts, number)) as known, known.open("wb") as file:
            np.save(file, np.column_stack([numbers + np.uint64(2), numbers + np.uint64(1), numbers]))
        files = (FileRecord(path=f"{number:05}.jsonl", sha256="0" * 64, size=1),)
        with atomic_path(delivery_marker(plan, number)) as part:
            part.write_bytes(Manifest(kind="part", files=files).to_bytes())
    return place, VersionPublisher(place.job({}), place.store, plan, counts, Pods())


def peak(folder: Path, parts: int) -> int:
    """Return the peak memory in bytes while a version is published."""
    _, made = delivery(folder, parts)
    tracemalloc.start()
    made.publish("train", "split", {})
    held = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return held


def test_memory_does_not_grow_with_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_index, "MAX_SEGMENT_RECORDS", 4 * RECORDS)
    few, many = (peak(tmp_path / str(parts), parts) for parts in (8, 64))
    assert few > 4 * RECORDS * 16
    assert many < few * 1.2


def test_index_numbers_records_in_file_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_index, "MAX_SEGMENT_RECORDS", 2 * RECORDS + 1)
    place, made = delivery(tmp_path, 6)
    index = find_index(place.store, made.publish(DATASET_ROLE, "dataset", {}))
    assert index is not None
    assert [segment.count for segment in index.records] == [10_001, 10_001, 10_001, 9_997]
    for number in (0, 4_999, 5_000, 10_000, 10_001, 17_000, 39_999):
        for segments, entry in (
            (index.records, IndexHit(number, number + 1, number + 1)),
            (index.origins, IndexHit(number + 2, number, number + 1)),
        ):
            assert list(number_hits(segments, {each: each.find(place.store, [entry.key]) for each in segments})) == [entry]


def test_prepared_records_are_found_across_index_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, wanted = questions(300), {"augment": {"mask_pii": True}}
    monkeypatch.setattr(record_index, "MAX_SEGMENT_RECORDS", 100)
    place = Place(tmp_path / "many", rows, SMALL)
    result = place.prepare(wanted)
    for role in (*SPLITS, DATASET_ROLE):
        artifact = result.artifacts[role]
        index = find_index(place.store, artifact)
        assert index is not None
        lines = [fingerprint_line(line) for line in iterate_record_lines(place.store, artifact)]
        assert len(index.records) == len(index.origins) == -(-len(lines) // 100)
        found = {each: each.find(place.store, {line.text for line in lines}) for each in index.records}
        entries = sorted(number_hits(index.records, found), key=lambda entry: entry.number)
        assert entries == [IndexHit(line.text, line.record, number) for number, line in enumerate(lines, start=1)]
