"""Merging key statistics of many ranges in rounds: equal results in bounded memory."""

import json
import random
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from recipes.contracts.parameters import PrepareParameters
from recipes.preparation import feature_statistics
from recipes.preparation.feature_stages import (
    FEATURES_FOLDER,
    build_state,
    fit_files,
    list_pending_merges,
    write_feature_files,
)
from recipes.preparation.feature_statistics import MERGED_FOLDER, ExactMoments, KeyStatistics, merge_tables, write_key_table
from recipes.preparation.plan import Plan, Range, write_table
from recipes.records.features import ONLINE_FILE, ONLINE_INDEX_FILE
from recipes.records.key_index import hash_key
from tests.recipes.preparation.preparation_workspace import sha256

FEATURES = {
    "key": "customer",
    "columns": {"age": {"normalize": "min_max"}},
    "aggregate": {"spend": ["count", "sum", "mean", "std", "min", "max"]},
}
FAN = 4
FEW = 33
"""Number of ranges: two merge rounds, as for twice as many."""
Hash = Callable[[str], int]
Records = list[list[tuple[str, dict[str, Any]]]]
"""Customers with their records, per range."""


def piled(key: str) -> int:
    """Return one of few hashes, so that many keys collide."""
    return hash_key(key) % 5


def drawn(ranges: int, customers: int) -> Records:
    draw = random.Random(7)
    names = [f"c{number}" for number in range(customers)]
    return [
        [(name, {"age": draw.randrange(90), "spend": draw.expovariate(0.01)}) for name in draw.choices(names, k=12)]
        for _ in range(ranges)
    ]


def apart(ranges: int) -> Records:
    """Generate records in which each customer occurs in a single range."""
    return [[(f"c{index}-{number}", {"age": number, "spend": 1.5}) for number in range(12)] for index in range(ranges)]


def fitted(work: Path, records: Records, fan: int, hashed: Hash = hash_key) -> Plan:
    """Return a plan whose ranges are all fitted."""
    ranges = tuple(Range("records.jsonl", index, index + 1) for index in range(len(records)))
    plan = Plan(work, ranges, PrepareParameters.model_validate({"features": FEATURES}), fan=fan)
    for index, found in enumerate(records):
        table, facts = fit_files(plan, index)
        ages: ExactMoments = ExactMoments()
        keys: dict[str, KeyStatistics] = {}
        for key, record in found:
            spend = keys[key].moments["spend"] if key in keys else ExactMoments()
            spend.add(record["spend"])
            ages.add(record["age"])
            keys[key] = KeyStatistics({"age": record["age"]}, {"spend": spend})
        write_key_table(table, sorted((hashed(key), key, each.to_json()) for key, each in keys.items()))
        facts.write_text(json.dumps({"moments": {"age": ages.to_json()}, "categories": {}}))
    return plan


def put_together(plan: Plan) -> None:
    state = build_state(plan)
    for level, number in list_pending_merges(plan):
        merge_tables(plan, level, number)
    write_feature_files(plan, state)


def served(plan: Plan) -> dict[str, str]:
    return {file.name: sha256(file) for file in (plan.work / FEATURES_FOLDER).iterdir()}


@pytest.mark.parametrize("ranges", [1, 4, 5, 27, 28])
@pytest.mark.parametrize("hashed", [hash_key, piled])
def test_merged_features_are_independent_of_fan_and_range_count(tmp_path: Path, ranges: int, hashed: Hash) -> None:
    records = drawn(ranges, 40)
    once = fitted(tmp_path / "once", records, 1000, hashed)
    put_together(once)
    for fan in (2, 3, 4):
        often = fitted(tmp_path / str(fan), records, fan, hashed)
        put_together(often)
        assert served(often) == served(once)
        assert not (often.work / MERGED_FOLDER).exists()
    last = {key: record["age"] for found in records for key, record in found}
    lines = [json.loads(line) for line in (once.work / FEATURES_FOLDER / ONLINE_FILE).read_bytes().splitlines()]
    assert [line["key"] for line in lines] == sorted(last, key=lambda key: (hashed(key), key))
    ages = [record["age"] for found in records for _, record in found]
    for key, features in ((line["key"], line["features"]) for line in lines):
        spent = [Fraction(record["spend"]) for found in records for name, record in found if name == key]
        assert features["age"] == (last[key] - min(ages)) / (max(ages) - min(ages))
        assert (features["spend.count"], features["spend.sum"]) == (len(spent), float(sum(spent)))
    assert (once.work / FEATURES_FOLDER / ONLINE_INDEX_FILE).stat().st_size == max(1, len(last) // 16) * 16 + 8


def test_merge_work_grows_linearly_with_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work is counted in opened files, at most `fan` at once, and in function calls."""
    monkeypatch.setattr(feature_statistics, "BATCH_BYTES", 2000)
    opened = mapped(tmp_path, monkeypatch)
    opens, calls = [], []
    for ranges in (FEW, 2 * FEW):
        plan = fitted(tmp_path / str(ranges), apart(ranges), FAN)
        opened.clear()
        calls.append(calls_of(partial(put_together, plan)))
        opens.append(len(opened))
        assert 0 < max(opened) <= FAN
    assert opens[1] < 2.2 * opens[0]
    assert calls[1] < 2.2 * calls[0]


def mapped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record, at each opened file, how many files below `folder` are mapped."""
    found: list[int] = []
    memory_map = pa.memory_map

    def counting(path: str) -> Any:
        file = memory_map(path)
        found.append(sum(str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines()))
        return file

    monkeypatch.setattr(pa, "memory_map", counting)
    return found


def calls_of(work: Callable[[], Any]) -> int:
    count = 0

    def count_call(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(count_call)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("records", [apart, lambda ranges: drawn(ranges, 5)], ids=["apart", "everywhere"])
def test_merge_memory_is_independent_of_range_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: Callable[[int], Records]
) -> None:
    monkeypatch.setattr(feature_statistics, "BATCH_BYTES", 2000)
    put_together(fitted(tmp_path / "first", records(2 * FEW), FAN))  # warm up Python's own allocations
    peaks = []
    for ranges in (FEW, 2 * FEW):
        plan = fitted(tmp_path / str(ranges), records(ranges), FAN)
        tracemalloc.start()
        put_together(plan)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]


def test_intermediate_tables_are_deleted_after_merge(tmp_path: Path) -> None:
    plan = fitted(tmp_path, drawn(FEW, 40), FAN)
    last = [merge_tables(plan, level, number) for level, number in list_pending_merges(plan)]
    assert 0 < len(last) <= FAN
    assert sorted(tmp_path.joinpath(MERGED_FOLDER).rglob("*.arrow")) == last
    assert all(file.is_file() for index in range(FEW) for file in fit_files(plan, index))


def test_merge_resumes_after_kill_within_a_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a kill at any table, no finished table is rebuilt and no input lost."""
    records = drawn(FEW, 40)
    whole = fitted(tmp_path / "whole", records, FAN)
    put_together(whole)
    began: list[Path] = []
    left = 0
    pieces = feature_statistics.make_batches

    def dying(rows: Iterator[feature_statistics.KeyRow]) -> Iterator[pa.RecordBatch]:
        nonlocal left
        left -= 1
        yield from pieces(rows)
        if left == 0:
            raise KeyboardInterrupt

    def noted(path: Path, *given: Any) -> None:
        began.append(path)
        write_table(path, *given)

    monkeypatch.setattr(feature_statistics, "make_batches", dying)
    monkeypatch.setattr(feature_statistics, "write_table", noted)
    tables = 12  # 9 of the first round, 3 of the second
    for killed in range(1, tables + 1):
        left = -1
        plan = fitted(tmp_path / str(killed), records, FAN)
        began.clear()
        left = killed
        with pytest.raises(KeyboardInterrupt):
            put_together(plan)
        put_together(plan)
        assert served(plan) == served(whole)
        assert len(began) == tables + 1 == len(set(began)) + 1
        assert began[killed - 1] == began[killed]
