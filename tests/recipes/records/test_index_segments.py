"""The record index in several segments: same answers as one, whose format is unchanged."""

import hashlib
import random
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from recipes.contracts.job import StoreAddress
from recipes.records import record_index
from recipes.records.record_index import (
    INDEX_ENTRY,
    RECORDS,
    HashPairs,
    IndexHit,
    RecordIndex,
    Segment,
    build_index_manifest,
    find_index,
    index_file_name,
    index_uri,
    number_hits,
    publish_record_index,
)
from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Artifact, FileRecord

BUCKETS = {kind: f"hanzo-{kind}" for kind in ("datasets", "checkpoints", "models")}
ARTIFACT = Artifact(kind="dataset", uri="s3://hanzo-ml/datasets/d/prepared/all", digest="0" * 64, size_bytes=0)
KEYS = 400
"""Fewer than records, so that a key occurs in several segments."""


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(StoreAddress(root=tmp_path.as_uri(), buckets=BUCKETS))


def hashes(count: int) -> tuple[HashPairs, HashPairs]:
    """Generate records and origins of an artifact, with repeated texts and sources."""
    draw = random.Random(1).getrandbits
    texts, sources = ([draw(64) for _ in range(KEYS)] for _ in range(2))
    rows = [(texts[draw(64) % KEYS], draw(64), sources[draw(64) % KEYS]) for _ in range(count)]
    text, own, source = np.array(rows, np.uint64).T
    return np.column_stack([text, own]), np.column_stack([source, text])


def parts(pairs: HashPairs, *lengths: int) -> Iterator[HashPairs]:
    """Split the pairs into parts of the given lengths and a rest."""
    for length in lengths:
        yield pairs[:length]
        pairs = pairs[length:]
    yield pairs


def index_of(store: Store) -> RecordIndex:
    index = find_index(store, ARTIFACT)
    assert index is not None
    return index


def answers(store: Store, segments: Sequence[Segment], keys: Collection[int]) -> dict[int, set[IndexHit]]:
    """Return all index entries of each key."""
    found = defaultdict(set)
    for each in number_hits(segments, {segment: segment.find(store, keys) for segment in segments}):
        found[each.key].add(each)
    return found


def expected(pairs: HashPairs) -> dict[int, set[IndexHit]]:
    found = defaultdict(set)
    for number, (key, value) in enumerate(pairs.tolist(), start=1):
        found[key].add(IndexHit(key, value, number))
    return found


@pytest.mark.parametrize(
    ("length", "count"),
    [(1 << 22, 1), (1234, 1), (1233, 2), (617, 2), (100, 13), pytest.param(1, 1234, marks=pytest.mark.slow)],
)
def test_an_index_of_any_number_of_segments_finds_every_record(
    store: Store, monkeypatch: pytest.MonkeyPatch, length: int, count: int
) -> None:
    monkeypatch.setattr(record_index, "MAX_SEGMENT_RECORDS", length)
    records, origins = hashes(1234)
    publish_record_index(store, ARTIFACT, parts(records, 0, 7, 100, 0, 1), parts(origins, 500))
    index = index_of(store)
    for segments, pairs in ((index.records, records), (index.origins, origins)):
        assert len(segments) == count
        assert sum(segment.count for segment in segments) == len(pairs)
        assert answers(store, segments, set(pairs[:, 0].tolist())) == expected(pairs)
        key = int(pairs[700, 0])
        assert answers(store, segments, [key]) == {key: expected(pairs)[key]}
        assert answers(store, segments, [12345]) == {}


def test_single_segment_index_keeps_its_digest(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """These digests were recorded before there could be several segments."""
    records, origins = hashes(1000)
    monkeypatch.setattr(record_index, "MAX_SEGMENT_RECORDS", 1000)
    for made_of, digest in (
        (origins, "dbce736e42fb198c2a9687a91ab1b5db00f0f24efd98bf96289f8b14ec0a8a3a"),
        (None, "e04a6b9dd20c4efeee11740a1f5d6d27206a6db6176893fce28a9175b0aff066"),
    ):
        publish_record_index(store, ARTIFACT, parts(records, 300), None if made_of is None else parts(made_of, 999))
        manifest = store.get_bytes(f"{index_uri(ARTIFACT.uri)}/manifest.json")
        assert hashlib.sha256(manifest).hexdigest() == digest
    assert hashlib.sha256(store.get_bytes(f"{index_uri(ARTIFACT.uri)}/records.index")).hexdigest() in manifest.decode()


def test_empty_dataset_has_an_index(store: Store) -> None:
    publish_record_index(store, ARTIFACT, [])
    assert index_of(store) == RecordIndex((), ())
    assert store.list(index_uri(ARTIFACT.uri)) == [
        f"{index_uri(ARTIFACT.uri)}/{name}" for name in ("manifest.json", "records.index")
    ]


def test_index_files_are_independent_of_input_batches(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_index, "MAX_SEGMENT_RECORDS", 100)
    records, origins = hashes(250)
    seen = set()
    for lengths in ((), (100, 100), (1, 99, 120), (50,) * 5):
        publish_record_index(store, ARTIFACT, parts(records, *lengths), parts(origins, *lengths))
        seen.add(tuple((uri.rpartition("/")[2], store.sha256(uri)) for uri in store.list(index_uri(ARTIFACT.uri))))
    (files,) = seen
    assert [name for name, _ in files] == [
        "manifest.json",
        "origins-00001.index",
        "origins-00002.index",
        "origins.index",
        "records-00001.index",
        "records-00002.index",
        "records.index",
    ]


def test_segments_are_ordered_beyond_five_digit_numbers(store: Store) -> None:
    """Beyond five digits, their names no longer sort numerically."""
    uri = index_uri(ARTIFACT.uri)
    names = [index_file_name(RECORDS, number) for number in (0, 1, 99_999, 100_000)]
    files = tuple(
        FileRecord(path=name, sha256="0" * 64, size=INDEX_ENTRY.itemsize * size) for size, name in enumerate(names, 1)
    )
    store.put_manifest(uri, build_index_manifest(ARTIFACT, files))
    assert index_of(store).records == tuple(Segment(f"{uri}/{name}", size) for size, name in enumerate(names, 1))
