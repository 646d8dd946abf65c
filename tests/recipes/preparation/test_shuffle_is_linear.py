"""Shuffling is linear in ranges and parts, counted in opened files and written bytes."""

import pickle
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from recipes.contracts.parameters import PrepareParameters
from recipes.preparation import pipeline
from recipes.preparation.plan import Plan, cut_ranges
from recipes.preparation.shuffle_plan import Bucket, ShufflePlan
from recipes.preparation.shuffle_stage import PARTS_FOLDER
from recipes.preparation.source import Source
from recipes.preparation.workers import MultiplePods, Pods, Unit, Workers
from recipes.storage.artifact_store import Store
from tests.recipes.preparation.preparation_workspace import Place, questions, sha256

PODS = 3
CHUNK_BYTES = 300
UNITS = {"range_bytes": 1_000, "part_bytes": 1_500}
FAN = 3
FEW = 75
"""Records, in more than `FAN` groups of `FAN` ranges: two rounds, as a third is needed only from three times as many."""


class InThisProcess(Workers):
    """Run units in this process, and count the pickled bytes that a worker would get."""

    def __init__(self) -> None:
        super().__init__(0)
        self.pickled_bytes = 0

    def run(self, unit: Unit, calls: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        self.pickled_bytes += len(pickle.dumps(unit))
        for arguments in calls:
            self.pickled_bytes += len(pickle.dumps(arguments))
            yield unit(*arguments)


def run_alone(folder: Path, place: Place, fan: int, pods: Pods | None = None, workers: Workers | None = None) -> Plan:
    source = Source(place.store, place.dataset, folder)
    ranges = cut_ranges(source.files.values(), UNITS["range_bytes"])
    plan = Plan(folder / "work", ranges, PrepareParameters(), UNITS["part_bytes"], fan)
    pipeline.run_pipeline(plan, source, workers or InThisProcess(), pods or Pods())
    return plan


def run_shared(folder: Path, place: Place, fan: int) -> list[Plan]:
    def pod(rank: int) -> Plan:
        mine = folder / str(rank)
        pods = MultiplePods(place.store, f"{place.dataset.uri}/given", mine / "work", rank, PODS, lambda: False, 0.01)
        return run_alone(mine, place, fan, pods)

    with ThreadPoolExecutor(PODS) as threads:
        return list(threads.map(pod, range(PODS)))


def parts_in(plan: Plan) -> dict[str, str]:
    return {file.name: sha256(file) for file in (plan.work / PARTS_FOLDER).rglob("*.jsonl")}


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, names: Iterable[str]) -> list[str]:
    """Record the name of a function at each call."""
    calls: list[str] = []

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            calls.append(name)
            return function(*arguments, **named)

        return call

    for name in names:
        monkeypatch.setattr(owner, name, counting(name, getattr(owner, name)))
    return calls


def test_shuffle_opens_and_writes_grow_linearly_with_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, loaded = counted(monkeypatch, pa, ["memory_map"]), counted(monkeypatch, np, ["load"])
    opens, sizes, pickled = [], [], []
    for count in (FEW, 2 * FEW):
        place = Place(tmp_path / f"place{count}", questions(count), chunk_bytes=CHUNK_BYTES)
        workers = InThisProcess()
        plan = run_alone(tmp_path / str(count), place, FAN, workers=workers)
        pickled.append(workers.pickled_bytes)
        opens.append(len(opened) + len(loaded))
        sizes.append(sum(file.stat().st_size for file in plan.work.rglob("*") if file.is_file()))
        opened.clear()
        loaded.clear()
        assert FAN**2 < len(plan.ranges) <= FAN**3
    assert opens[1] < 2.2 * opens[0]
    assert sizes[1] < 2.2 * sizes[0]
    assert pickled[1] < 2.2 * pickled[0]


def test_shuffle_objects_between_pods_grow_linearly_with_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch, Store, ["put_file", "open"])
    found = []
    for count in (FEW, 2 * FEW):
        place = Place(tmp_path / str(count), questions(count))
        calls.clear()
        plans = run_shared(tmp_path / f"pods{count}", place, FAN)
        found.append(len(calls))
    assert found[1] < 2.2 * found[0]
    alone = run_alone(tmp_path / "alone", place, 1000)
    assert {name: digest for plan in plans for name, digest in parts_in(plan).items()} == parts_in(alone)


@pytest.mark.parametrize("fan", [2, 3])
def test_shuffle_parts_are_independent_of_round_count(tmp_path: Path, fan: int) -> None:
    place = Place(tmp_path, questions(60))
    once, often = run_alone(tmp_path / "once", place, 1000), run_alone(tmp_path / "often", place, fan)
    assert parts_in(once) == parts_in(often)


@pytest.mark.parametrize("pods", [1, 3, 7])
@pytest.mark.parametrize("ranges", [1, 5, 100])
@pytest.mark.parametrize("parts", [3, 64])
def test_shuffle_plan_covers_every_part_and_range_exactly_once(pods: int, ranges: int, parts: int) -> None:
    shuffle = ShufflePlan(ranges, pods, FAN, parts)
    groups = shuffle.groups(shuffle.root)
    assert sorted(number for group in groups for number in group) == [*range(ranges)]
    assert len(groups) == shuffle.count_groups(shuffle.root)
    assert {number: group for rank in range(pods) for number, group in shuffle.own_groups(rank).items()} == dict(
        enumerate(groups)
    )

    def parts_of(bucket: Bucket) -> list[int]:
        if shuffle.is_ready(bucket):
            assert 0 < bucket.files <= FAN
            assert shuffle.boundaries(bucket) == [*range(bucket.first, bucket.end + 1)]
            return [*range(bucket.first, bucket.end)]
        assert bucket.level == 0 or len(shuffle.groups(bucket)) < bucket.files
        return [part for smaller in shuffle.child_buckets(bucket) for part in parts_of(smaller)]

    assert parts_of(shuffle.root) == [*range(parts)]
    of_pods = [parts * rank // pods for rank in range(pods + 1)]
    for first, end in pairwise(of_pods):
        assert {first, end} <= set(shuffle.boundaries(shuffle.root))
