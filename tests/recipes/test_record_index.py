"""The index of records: every key is found wherever it lies, and equal runs of records are equal segments."""

import hashlib
import random
from pathlib import Path

import pytest

from recipes.record_index import AVERAGE, ENTRY, FEW, MAX, MIN, Found, Segment, Segments
from recipes.schema import StoreAddress
from recipes.store import Store

URI = "s3://hanzo-ml/datasets/d/1/records.index/records.index"
BUCKETS = {kind: f"hanzo-{kind}" for kind in ("datasets", "checkpoints", "models")}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(StoreAddress(root=tmp_path.as_uri(), buckets=BUCKETS))


def segment_of(store: Store, keys: list[int]) -> Segment:
    """All keys in one segment; the value of each is its number + 1."""
    segments = Segments()
    for number, key in enumerate(keys):
        assert segments.add(key, number + 1) is None
    data = segments.finish()
    assert len(data) == len(keys) * ENTRY.itemsize
    store.put_bytes(URI, data)
    return Segment(URI, len(keys))


def draws(count: int, seed: int = 1) -> list[int]:
    draw = random.Random(seed)
    return [draw.getrandbits(64) for _ in range(count)]


@pytest.mark.parametrize("count", [1, 2, 100, MIN - 1])
def test_every_key_is_found_and_no_other(store: Store, count: int) -> None:
    keys = draws(count)
    segment = segment_of(store, keys)
    for number in {0, count // 3, count - 1}:
        assert segment.find(store, [keys[number]]) == [Found(keys[number], number + 1, number)]
    assert segment.find(store, draws(5, seed=2)) == []


@pytest.mark.parametrize("edge", [0, 1, (1 << 64) - 1])
def test_keys_at_the_edges_are_found(store: Store, edge: int) -> None:
    segment = segment_of(store, [*draws(500), edge])
    assert segment.find(store, [edge]) == [Found(edge, 501, 500)]


@pytest.mark.parametrize("place", [0.001, 0.3, 0.999])
def test_a_key_with_very_many_entries_hides_no_other(store: Store, place: float) -> None:
    common = int(place * 2**64)
    keys = [key for pair in zip(draws(2000), [common] * 2000, strict=True) for key in pair]
    segment = segment_of(store, keys)
    assert len(segment.find(store, [common])) == 2000
    for number in range(0, 4000, 500):
        assert [found.number for found in segment.find(store, [keys[number]])] == [number]


def test_many_keys_are_found_as_each_alone(store: Store) -> None:
    keys = draws(3000)
    segment = segment_of(store, keys)
    wanted = keys[: FEW * 3]
    together = sorted(segment.find(store, wanted), key=lambda found: found.number)
    assert together == [found for key in wanted for found in segment.find(store, [key])]


def cut(records: list[int]) -> list[str]:
    segments = Segments()
    made = [data for record in records if (data := segments.add(record, record))] + [segments.finish()]
    assert all(MIN <= len(data) // ENTRY.itemsize <= MAX for data in made[:-1])
    return [hashlib.sha256(data).hexdigest() for data in made]


def test_versions_that_share_records_share_segments() -> None:
    records = draws(AVERAGE * 8)
    before = cut(records)
    place = len(records) // 2
    after = cut([*records[:place], *draws(1000, seed=3), *records[place + 500 :]])
    assert len(before) > 4
    assert len(set(after) - set(before)) <= 2
