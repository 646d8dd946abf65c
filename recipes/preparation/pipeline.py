"""The stages of a preparation, one after the other; within a stage the workers of all pods share its units.

read (range) -> distinct -> encode (range) -> decide -> features -> scatter (range) -> spread (group) -> gather (part)

What only the whole dataset can tell (distinct, decide, what features are fitted to) the first pod finds out, from a few
columns that the others give it.
"""

import json
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recipes.assignment import SPLITS, assign, leaks, named, refuse_no_groups
from recipes.preparation import encoding, fitting, reading
from recipes.preparation.deciding import Decisions, oversample
from recipes.preparation.delivery import delivered
from recipes.preparation.draws import together
from recipes.preparation.duplicates import duplicates
from recipes.preparation.encoding import DISTINCT, encode, encode_facts
from recipes.preparation.near_duplicates import near_duplicates
from recipes.preparation.ordering import DECIDED, Parts, gather, scatter
from recipes.preparation.plan import Plan, written
from recipes.preparation.pods import Pods
from recipes.preparation.reading import TOLD, is_read, read, read_facts, told
from recipes.preparation.rejects import Reject, write_rejects
from recipes.preparation.shuffle import Bucket, Shuffle
from recipes.preparation.source import Source
from recipes.preparation.spreading import exchange, is_spread, spread
from recipes.preparation.tables import open_table
from recipes.preparation.workers import Unit, Workers
from recipes.runner import say
from recipes.schema import BadConfiguration

REJECTED = "rejected.jsonl"
PARTS_FILE = "parts.json"
SAY_EVERY_SECONDS = 10.0
DUPLICATE, NEAR_DUPLICATE = 1, 2


@dataclass(frozen=True)
class Prepared:
    """What came out: records by split, rejects by reason, masked by kind, copies added by class, leaked held-out records,
    those whose end was cut off, the columns in which a number is a text since it was masked, and of each column that lacked
    values the records in which it was filled.
    """

    records: dict[str, int]
    rejected: dict[str, int]
    masked: dict[str, int]
    oversampled: dict[str, int]
    leaked: int
    truncated: int
    retyped: tuple[str, ...]
    filled: dict[str, int]
    lines: int


def run(plan: Plan, source: Source, workers: Workers, pods: Pods) -> tuple[Parts, Prepared | None]:
    """Do all stages that are not done yet. `plan.ranges` are of `source`; this pod's parts lie in `plan.work / PARTS`.

    Returns how many parts there are, and, to the first pod, what came out; there the rejects lie in `REJECTED`.

    Raises:
        BadConfiguration: no record is left, or too few to split.
        BrokenArtifact: what the source has is not what was recorded.
    """
    ranges = range(len(plan.ranges))
    shuffle = Shuffle(len(ranges), pods.count, plan.fan)
    own_groups = shuffle.own_groups(pods.rank)
    # Once the pods can have what a group of ranges has for their parts, nothing else is ever asked of it again.
    groups = [group for group in own_groups if not pods.has(is_spread(plan, 0, 0, group))]
    own = sorted(index for group in groups for index in own_groups[group])
    leads = pods.rank == 0
    to_read = [index for index in own if not is_read(plan, index)]
    source.fetch(plan.ranges[index].file for index in to_read)
    share(workers, "read", partial(read, plan), [(index, source.of(plan.ranges[index])) for index in to_read])
    for index in own:
        give(pods, files_of(plan, reading.STAGE, index))
    if leads:
        for index in ranges:
            take(pods, files_of(plan, reading.STAGE, index))
        find_duplicates(plan)
        give(pods, [plan.place(DISTINCT, index, "npy") for index in ranges])
    take(pods, [plan.place(DISTINCT, index, "npy") for index in own])
    share(workers, "encoded", partial(encode, plan), [(index,) for index in own])
    for index in own:
        give(pods, files_of(plan, encoding.STAGE, index))
    prepared = None
    if leads:
        for index in ranges:
            take(pods, files_of(plan, encoding.STAGE, index))
        prepared = decide_all(plan)
        give(pods, [*(plan.place(DECIDED, index, "npy") for index in ranges), plan.work / PARTS_FILE])
    take(pods, [*(plan.place(DECIDED, index, "npy") for index in own), plan.work / PARTS_FILE])
    parts = tuple(json.loads((plan.work / PARTS_FILE).read_bytes()))
    if plan.parameters.features is not None:
        add_features(plan, workers, pods, own)
    shuffle = replace(shuffle, parts=sum(parts))
    share(workers, "sorted", partial(scatter, plan, parts, shuffle), [(index,) for index in own])
    first, end = pods.run_of(sum(parts), pods.rank)
    wanted = [number for number in range(first, end) if not pods.has(delivered(plan, number))]
    buckets = ready_buckets(plan, shuffle, workers, pods, groups, wanted)
    share(workers, "written", partial(gather, plan, parts), buckets, of="parts")
    return parts, prepared


def add_features(plan: Plan, workers: Workers, pods: Pods, own: Sequence[int]) -> None:
    """Fit the features to what all pods have, and add them to the records of this one. Raises as `fitting.fit_all`."""
    share(workers, "fitted", partial(fitting.fit, plan), [(index,) for index in own])
    for index in own:
        give(pods, fitting.fitted_files(plan, index))
    if pods.rank == 0:
        for index in range(len(plan.ranges)):
            take(pods, fitting.fitted_files(plan, index))
        fitting.fit_all(plan)
        give(pods, fitting.files_of(plan))
    take(pods, fitting.files_of(plan))
    share(workers, "computed", partial(fitting.compute, plan), [(index,) for index in own])


def files_of(plan: Plan, stage: str, index: int) -> list[Path]:
    """What a pod tells of a range after a stage; the last one is written last."""
    signed = stage == reading.STAGE and plan.parameters.filter.near_dedup is not None
    return [plan.place(stage, index, suffix) for suffix in (TOLD, *(("npy",) if signed else ()), "json")]


def give(pods: Pods, paths: Iterable[Path]) -> None:
    for path in paths:
        pods.give(path)


def take(pods: Pods, paths: Iterable[Path]) -> None:
    for path in paths:
        pods.take(path)


def ready_buckets(
    plan: Plan, shuffle: Shuffle, workers: Workers, pods: Pods, groups: Sequence[int], wanted: Sequence[int]
) -> list[tuple[Bucket, int]]:
    """The wanted parts, each with the bucket that it is read of: where its runs are too many, they are spread first."""
    ready: list[tuple[Bucket, int]] = []
    waiting = [shuffle.root]
    while waiting:
        smaller: list[Bucket] = []
        calls: list[tuple[Bucket, int]] = []
        for bucket in waiting:
            numbers = wanted[bisect_left(wanted, bucket.first) : bisect_left(wanted, bucket.end)]
            if shuffle.is_ready(bucket):
                ready += [(bucket, number) for number in numbers]
            elif numbers or bucket.level == 0:
                of_bucket = groups if bucket.level == 0 else range(shuffle.count_groups(bucket))
                calls += [(bucket, group) for group in of_bucket]
                smaller += shuffle.smaller(bucket)
        share(workers, "spread", partial(spread, plan, shuffle), calls, of="groups")
        if pods.count > 1 and waiting == [shuffle.root]:
            smaller = exchange(plan, shuffle, pods, groups, wanted)
        waiting = smaller
    return ready


def decide_all(plan: Plan) -> Prepared:
    """Everything that depends on all records, and what is told of it."""
    rejected = write_rejects(plan.work / REJECTED, plan, all_rejects(plan))
    decisions = decide(plan, rejected)
    with written(plan.work / PARTS_FILE) as part:
        part.write_text(json.dumps(parts_of(plan, decisions)))
    facts = [read_facts(plan, index) for index in range(len(plan.ranges))]
    return Prepared(
        records={
            name: int(decisions.copies[decisions.split == place].sum(dtype=np.int64)) for place, name in enumerate(SPLITS)
        },
        rejected=dict(sorted(rejected.items())),
        masked=total(fact.masked for fact in facts),
        oversampled=dict(decisions.oversampled),
        leaked=decisions.leaked,
        truncated=sum(encode_facts(plan, index).truncated for index in range(len(plan.ranges))),
        retyped=tuple(sorted({column for fact in facts for column in fact.retyped})),
        filled=total(fact.filled for fact in facts),
        lines=sum(fact.lines for fact in facts),
    )


def total(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    """The counts of all ranges together, in one order."""
    return dict(sorted(sum(map(Counter, counts), Counter()).items()))


def share(workers: Workers, done: str, unit: Unit, calls: Sequence[tuple[Any, ...]], of: str = "ranges") -> None:
    """Run a stage, and say now and then how far it is."""
    said = time.monotonic()
    for number, _ in enumerate(workers.run(unit, calls), start=1):
        if time.monotonic() - said > SAY_EVERY_SECONDS or number == len(calls):
            said = time.monotonic()
            say(f"{done} {number} of {len(calls)} {of}")


def find_duplicates(plan: Plan) -> None:
    """Leave for each range which of its records are not the first: 0 stays, else why it goes."""
    tables = [plan.place(reading.STAGE, index, TOLD) for index in range(len(plan.ranges))]
    wanted = plan.parameters.filter
    gone = [np.zeros(open_table(table).num_rows, dtype=np.int8) for table in tables]
    if wanted.dedup:
        for marks, again in zip(gone, duplicates(tables), strict=True):
            marks[again] = DUPLICATE
    if wanted.near_dedup is not None:
        files = [plan.place(reading.STAGE, index, "npy") for index in range(len(plan.ranges))]
        near = near_duplicates(files, [marks == 0 for marks in gone], wanted.near_dedup)
        for marks, again in zip(gone, near, strict=True):
            marks[again] = NEAR_DUPLICATE
    for index, marks in enumerate(gone):
        save(plan, DISTINCT, index, marks)


def save(plan: Plan, stage: str, index: int, array: NDArray[Any]) -> None:
    with written(plan.place(stage, index, "npy")) as part, part.open("wb") as file:
        np.save(file, array)


def all_rejects(plan: Plan) -> Iterator[tuple[int, list[Reject]]]:
    """Of each range: its number of lines, and what every stage rejected of it."""
    reasons = {DUPLICATE: "duplicate", NEAR_DUPLICATE: "near duplicate"}
    for index in range(len(plan.ranges)):
        facts = read_facts(plan, index)
        marks = np.load(plan.place(DISTINCT, index, "npy"))
        lines = told(plan, reading.STAGE, index).column("line").to_numpy()
        again = [Reject(int(lines[row]), reasons[int(marks[row])]) for row in np.flatnonzero(marks)]
        yield facts.lines, [*facts.rejects, *again, *encode_facts(plan, index).rejects]


def decide(plan: Plan, rejected: Counter[str]) -> Decisions:
    """Split and copies of every record; left for each range beside its records.

    Raises:
        BadConfiguration: no record is left, none is in a group, or a split would be empty.
    """
    wanted = plan.parameters
    tables = [told(plan, encoding.STAGE, index) for index in range(len(plan.ranges))]
    table = pa.concat_tables(tables) if tables else None
    if table is None or not table.num_rows:
        reasons = ", ".join(f"{count} {reason}" for reason, count in rejected.most_common()) or "the dataset is empty"
        raise BadConfiguration(f"no record is left: {reasons}")
    draw = together(table.column("draw").to_numpy(), table.column("masked").to_numpy())
    if wanted.split.column:
        split = named(table.column("split").to_numpy(), wanted.split.column)
    else:
        group, groups = codes(table.column("group"))
        refuse_no_groups(groups, wanted.split)
        split = assign(draw, group, wanted.split)
    copies = np.ones(len(split), dtype=np.int32)
    added: dict[str, int] = {}
    if wanted.augment.oversample_minority:
        classes, names = codes(table.column("class"))
        copies, added = oversample(split, classes, names, draw, wanted.augment.shuffle_seed or 0)
    decisions = Decisions(split=split, copies=copies, leaked=leaks(draw, split), oversampled=added)
    start = 0
    for index, part in enumerate(tables):
        rows = slice(start, start + part.num_rows)
        save(plan, DECIDED, index, np.stack([split[rows], copies[rows]]))
        start += part.num_rows
    return decisions


def codes(column: pa.ChunkedArray) -> tuple[NDArray[np.int64], list[str]]:
    """Texts as numbers, in the order of their first appearance; and the texts."""
    encoded = column.dictionary_encode().unify_dictionaries().combine_chunks()
    return encoded.indices.to_numpy().astype(np.int64), encoded.dictionary.to_pylist()


def parts_of(plan: Plan, decisions: Decisions) -> Parts:
    """How many files each split gets: a matter of the data alone."""
    total = sum(encode_facts(plan, index).size for index in range(len(plan.ranges)))
    each = total / len(decisions.split)
    sizes = [each * decisions.copies[decisions.split == place].sum(dtype=np.int64) for place in range(len(SPLITS))]
    return tuple(max(1, ceil(size / plan.part_bytes)) for size in sizes)
