"""The record index: keys are found in any segment; equal records give equal segments."""

import hashlib
import random
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from recipes.contracts.job import StoreAddress
from recipes.records.record_index import (
    AVERAGE_SEGMENT_ENTRIES,
    INDEX_ENTRY,
    MAX_SEGMENT_ENTRIES,
    MIN_SEGMENT_ENTRIES,
    IndexHit,
    Segment,
    SegmentBuilder,
    sort_segment,
)
from recipes.storage.artifact_store import Store
from tests.support.s3_server import VARIABLES, S3Server

URI = "s3://hanzo-ml/datasets/d/1/records.index/records.index"
BUCKETS = {kind: f"hanzo-{kind}" for kind in ("datasets", "checkpoints", "models")}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(StoreAddress(root=tmp_path.as_uri(), buckets=BUCKETS))


def segment_of(store: Store, keys: list[int]) -> Segment:
    """Store all keys in one segment; the value of each is its number + 1."""
    segments = SegmentBuilder()
    for number, key in enumerate(keys):
        assert segments.add(key, number + 1) is None
    data = segments.finish()
    assert len(data) == len(keys) * INDEX_ENTRY.itemsize
    store.put_bytes(URI, data)
    return Segment(URI, len(keys))


def draws(count: int, seed: int = 1) -> list[int]:
    draw = random.Random(seed)
    return [draw.getrandbits(64) for _ in range(count)]


@pytest.mark.parametrize("count", [1, 2, 100, MIN_SEGMENT_ENTRIES - 1])
def test_every_key_is_found_and_no_other(store: Store, count: int) -> None:
    keys = draws(count)
    segment = segment_of(store, keys)
    for number in {0, count // 3, count - 1}:
        assert segment.find(store, [keys[number]]) == [IndexHit(keys[number], number + 1, number)]
    assert segment.find(store, draws(5, seed=2)) == []


@pytest.mark.parametrize("edge", [0, 1, (1 << 64) - 1])
def test_keys_at_the_edges_are_found(store: Store, edge: int) -> None:
    segment = segment_of(store, [*draws(500), edge])
    assert segment.find(store, [edge]) == [IndexHit(edge, 501, 500)]


@pytest.mark.parametrize("place", [0.001, 0.3, 0.999])
def test_a_key_with_very_many_entries_hides_no_other(store: Store, place: float) -> None:
    common = int(place * 2**64)
    keys = [key for pair in zip(draws(2000), [common] * 2000, strict=True) for key in pair]
    segment = segment_of(store, keys)
    assert len(segment.find(store, [common])) == 2000
    for number in range(0, 4000, 500):
        assert [found.number for found in segment.find(store, [keys[number]])] == [number]


def test_batch_lookup_equals_single_lookups(store: Store) -> None:
    keys = draws(3000)
    segment = segment_of(store, keys)
    wanted = keys[:48]
    together = sorted(segment.find(store, wanted), key=lambda found: found.number)
    assert together == [found for key in wanted for found in segment.find(store, [key])]


def test_lookup_in_a_large_segment_holds_only_part_of_it(store: Store) -> None:
    """Sixteen are searched concurrently, and a segment stored as a file may have 80 MB."""
    count = MAX_SEGMENT_ENTRIES * 10 + 5
    keys = np.random.default_rng(1).integers(0, 1 << 64, count, np.uint64)
    store.put_bytes(URI, sort_segment(keys, keys))
    wanted = [*range(0, count, 1000), count - 1]
    tracemalloc.start()
    found = Segment(URI, count).find(store, keys[wanted].tolist())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sorted(each.number for each in found) == wanted
    assert all(each.key == each.value == keys[each.number] for each in found)
    assert peak < count * INDEX_ENTRY.itemsize / 2


def test_a_key_takes_one_request(s3: S3Server) -> None:
    store = Store(s3.address, VARIABLES)
    keys = draws(3000)
    segment = segment_of(store, keys)
    s3.requests.clear()
    assert segment.find(store, [keys[5]]) == [IndexHit(keys[5], 6, 5)]
    assert [(request.method, "range" in request.headers) for request in s3.requests] == [("GET", True)]


def cut(records: list[int]) -> list[str]:
    segments = SegmentBuilder()
    made = [data for record in records if (data := segments.add(record, record))] + [segments.finish()]
    assert all(MIN_SEGMENT_ENTRIES <= len(data) // INDEX_ENTRY.itemsize <= MAX_SEGMENT_ENTRIES for data in made[:-1])
    return [hashlib.sha256(data).hexdigest() for data in made]


def test_versions_that_share_records_share_segments() -> None:
    records = draws(AVERAGE_SEGMENT_ENTRIES * 8)
    before = cut(records)
    place = len(records) // 2
    after = cut([*records[:place], *draws(1000, seed=3), *records[place + 500 :]])
    assert len(before) > 4
    assert len(set(after) - set(before)) <= 2
