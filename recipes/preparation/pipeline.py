"""The stages of a preparation, one after the other; within a stage the workers of all pods share its units.

read (range) -> distinct -> encode (range) -> decide -> features -> scatter (range) -> spread (group) -> gather (part)

What only the whole dataset can tell (distinct, decide, what features are fitted to) the first pod finds out, from a few
columns that the others give it.
"""

import json
import shutil
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from recipes.contracts.job import BadConfiguration
from recipes.preparation import encode_stage, fitting, read_stage
from recipes.preparation.deduplication import near_duplicates
from recipes.preparation.duplicates import duplicates, halves
from recipes.preparation.encode_stage import DISTINCT, encode, encode_facts
from recipes.preparation.feature_stages import compute
from recipes.preparation.feature_statistics import merge
from recipes.preparation.plan import Plan, written
from recipes.preparation.pods import Pods
from recipes.preparation.publishing import delivered
from recipes.preparation.read_stage import TOLD, is_read, read, read_facts, told
from recipes.preparation.rejected_records import Reject, write_rejects
from recipes.preparation.shuffle_plan import Bucket, Shuffle
from recipes.preparation.shuffle_stage import Parts, gather, scatter
from recipes.preparation.sorted_runs import exchange, is_spread, spread
from recipes.preparation.source import Source
from recipes.preparation.split_assignment import SPLITS
from recipes.preparation.split_stage import DECIDED, Decided, decide
from recipes.preparation.tables import save_array
from recipes.preparation.workers import Unit, Workers
from recipes.runner import say

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
    pods.give_all(files_of(plan, read_stage.STAGE, index) for index in own)
    if leads:
        pods.take(path for index in ranges for path in files_of(plan, read_stage.STAGE, index))
        find_duplicates(plan)
        pods.give_all([plan.place(DISTINCT, index, "npy")] for index in ranges)
    pods.take(plan.place(DISTINCT, index, "npy") for index in own)
    share(workers, "encoded", partial(encode, plan), [(index,) for index in own])
    pods.give_all(files_of(plan, encode_stage.STAGE, index) for index in own)
    prepared = None
    if leads:
        pods.take(path for index in ranges for path in files_of(plan, encode_stage.STAGE, index))
        prepared = decide_all(plan)
        pods.give_all([plan.place(DECIDED, index, "npy")] for index in ranges)
        pods.give(plan.work / PARTS_FILE)
    pods.take([*(plan.place(DECIDED, index, "npy") for index in own), plan.work / PARTS_FILE])
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
    """Fit the features to what all pods have, and add them to the records of this one. Raises as `fitting.state_of`."""
    share(workers, "fitted", partial(fitting.fit, plan), [(index,) for index in own])
    pods.give_all(fitting.fitted_files(plan, index) for index in own)
    if pods.rank == 0:
        pods.take(path for index in range(len(plan.ranges)) for path in fitting.fitted_files(plan, index))
        state = fitting.state_of(plan)  # before the keys: what cannot be fitted is told early
        share(workers, "merged", partial(merge, plan), fitting.to_merge(plan), of="tables")
        fitting.fit_all(plan, state)
        pods.give(*fitting.files_of(plan))
    pods.take(fitting.files_of(plan))
    share(workers, "computed", partial(compute, plan), [(index,) for index in own])


def files_of(plan: Plan, stage: str, index: int) -> list[Path]:
    """What a pod tells of a range after a stage; the last one is written last."""
    signed = stage == read_stage.STAGE and plan.parameters.filter.near_dedup is not None
    return [plan.place(stage, index, suffix) for suffix in (TOLD, *(("npy",) if signed else ()), "json")]


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
    """Everything that depends on all records, and what is told of it.

    Raises:
        BadConfiguration: no record is left, or as `decide`.
    """
    rejected = write_rejects(plan.work / REJECTED, plan, all_rejects(plan))
    ranges = range(len(plan.ranges))
    lengths = [told(plan, encode_stage.STAGE, index).num_rows for index in ranges]
    if not any(lengths):
        reasons = ", ".join(f"{count} {reason}" for reason, count in rejected.most_common()) or "the dataset is empty"
        raise BadConfiguration(f"no record is left: {reasons}{first_of(plan.work / REJECTED)}")
    decided = decide(plan, lengths)
    masked, filled, retyped = Counter[str](), Counter[str](), set[str]()
    lines = truncated = size = 0
    for index in ranges:  # one after the other: each has its rejects, of which there may be as many as records
        facts, encoded = read_facts(plan, index), encode_facts(plan, index)
        masked.update(facts.masked)
        filled.update(facts.filled)
        retyped.update(facts.retyped)
        lines += facts.lines
        truncated += encoded.truncated
        size += encoded.size
    with written(plan.work / PARTS_FILE) as part:
        part.write_text(json.dumps(parts_of(decided, size, plan.part_bytes)))
    return Prepared(
        records=dict(zip(SPLITS, decided.records, strict=True)),
        rejected=dict(sorted(rejected.items())),
        masked=dict(sorted(masked.items())),
        oversampled=decided.oversampled,
        leaked=decided.leaked,
        truncated=truncated,
        retyped=tuple(sorted(retyped)),
        filled=dict(sorted(filled.items())),
        lines=lines,
    )


def share(workers: Workers, done: str, unit: Unit, calls: Sequence[tuple[Any, ...]], of: str = "ranges") -> None:
    """Run a stage, and say now and then how far it is."""
    said = time.monotonic()
    for number, _ in enumerate(workers.run(unit, calls), start=1):
        if time.monotonic() - said > SAY_EVERY_SECONDS or number == len(calls):
            said = time.monotonic()
            say(f"{done} {number} of {len(calls)} {of}")


def find_duplicates(plan: Plan) -> None:
    """Leave for each range which of its records are not the first: 0 stays, else why it goes."""
    ranges, wanted, scratch = range(len(plan.ranges)), plan.parameters.filter, plan.scratch
    shutil.rmtree(scratch.folder, ignore_errors=True)  # of a process that was killed, and may have been further
    lengths = [told(plan, read_stage.STAGE, index).num_rows for index in ranges]
    total = sum(lengths)
    with scratch.column("equal", np.int8, total, 0) as equal, scratch.column("near", np.int8, total, 0) as near:
        if wanted.dedup:
            digests = (halves(told(plan, read_stage.STAGE, index).column("digest")) for index in ranges)
            for places in duplicates(digests, total, scratch):
                equal.put(places, DUPLICATE)
        if wanted.near_dedup is not None:
            signatures = [plan.place(read_stage.STAGE, index, "npy") for index in ranges]
            kept = (marks == 0 for marks in equal.runs(lengths))
            for places in near_duplicates(signatures, kept, total, wanted.near_dedup, scratch):
                near.put(places, NEAR_DUPLICATE)
        for index, marks in enumerate(zip(equal.runs(lengths), near.runs(lengths), strict=True)):
            save_array(plan.place(DISTINCT, index, "npy"), np.maximum(*marks))


def first_of(rejects: Path) -> str:
    """What was wrong with the first record that was rejected, if one was: who is told that nothing is left has only this."""
    with rejects.open(encoding="utf-8") as lines:
        line = lines.readline()
    if not line:
        return ""
    first = json.loads(line)
    return f"; the first: {first['file']}, line {first['line']}: {first['detail']}"


def all_rejects(plan: Plan) -> Iterator[tuple[int, list[Reject]]]:
    """Of each range: its number of lines, and what every stage rejected of it."""
    reasons = {DUPLICATE: "duplicate", NEAR_DUPLICATE: "near duplicate"}
    for index in range(len(plan.ranges)):
        facts = read_facts(plan, index)
        marks = np.load(plan.place(DISTINCT, index, "npy"))
        lines = told(plan, read_stage.STAGE, index).column("line").to_numpy()
        again = [Reject(int(lines[row]), reasons[int(marks[row])]) for row in np.flatnonzero(marks)]
        yield facts.lines, [*facts.rejects, *again, *encode_facts(plan, index).rejects]


def parts_of(decided: Decided, size: int, part_bytes: int) -> Parts:
    """How many files each split gets of records that have `size` bytes without copies: a matter of the data alone."""
    each = size / decided.distinct
    return tuple(max(1, ceil(each * count / part_bytes)) for count in decided.records)
