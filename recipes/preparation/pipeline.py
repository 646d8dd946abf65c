"""Run the stages of a preparation, distributed over the workers of all pods."""

import json
import shutil
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from recipes.contracts.job import BadConfiguration
from recipes.preparation import encode_stage, feature_stages, read_stage
from recipes.preparation.deduplication import digest_words, find_exact_duplicates, find_near_duplicates
from recipes.preparation.encode_stage import DISTINCT_STAGE, encode_range, read_encode_facts
from recipes.preparation.feature_stages import compute_range
from recipes.preparation.feature_statistics import merge_tables
from recipes.preparation.plan import Plan, Reject, atomic_path, save_array, write_rejected_records
from recipes.preparation.publishing import delivery_marker
from recipes.preparation.read_stage import SUMMARY_SUFFIX, is_read, read_facts, read_range, read_summary
from recipes.preparation.shuffle_plan import Bucket, ShufflePlan
from recipes.preparation.shuffle_stage import (
    PartCounts,
    exchange_runs,
    gather_part,
    scatter_range,
    spread_group,
    spread_marker,
)
from recipes.preparation.source import Source
from recipes.preparation.split_assignment import SPLITS
from recipes.preparation.split_stage import SPLIT_STAGE, SplitDecision, assign_records
from recipes.preparation.workers import Pods, Unit, Workers
from recipes.runner import log_line

REJECTED_FILE = "rejected.jsonl"
PARTS_FILE = "parts.json"
LOG_INTERVAL_SECONDS = 10.0
DUPLICATE, NEAR_DUPLICATE = 1, 2


@dataclass(frozen=True)
class PreparationSummary:
    """Summary of a preparation.

    Attributes:
        records: number of records by split.
        rejected: number of rejects by reason.
        masked: number of masked items by kind.
        oversampled: number of copies added, by class.
        leaked: number of held-out records whose question is also in the training split.
        truncated: number of truncated records.
        retyped: columns in which masking turned a number into text.
        filled: number of records in which a missing value was filled, by column.
        unread: number of records with keys in messages and tools that no model reads, by key.
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
    unread: dict[str, int] = field(default_factory=dict)


def run_pipeline(plan: Plan, source: Source, workers: Workers, pods: Pods) -> tuple[PartCounts, PreparationSummary | None]:
    """Run all stages that are not done yet.

    This pod's parts are in `plan.work / PARTS_FOLDER`. Returns the number of parts per split, and in the first pod the
    summary; it has the rejects in `REJECTED_FILE`.

    Raises:
        BadConfiguration: no record is left, or too few to split.
        BrokenArtifact: the source differs from its manifest.
    """
    ranges = range(len(plan.ranges))
    shuffle = ShufflePlan(len(ranges), pods.count, plan.fan)
    own_groups = shuffle.own_groups(pods.rank)
    # Once a group's records are published for the other pods' parts, earlier stages of the group are not needed again.
    groups = [group for group in own_groups if not pods.is_published(spread_marker(plan, 0, 0, group))]
    own = sorted(index for group in groups for index in own_groups[group])
    is_first_pod = pods.rank == 0
    to_read = [index for index in own if not is_read(plan, index)]
    source.fetch(plan.ranges[index].file for index in to_read)
    run_stage(
        workers, "read", partial(read_range, plan), [(index, source.range_file(plan.ranges[index])) for index in to_read]
    )
    pods.publish_all(stage_files(plan, read_stage.STAGE, index) for index in own)
    if is_first_pod:
        pods.fetch(path for index in ranges for path in stage_files(plan, read_stage.STAGE, index))
        mark_duplicates(plan)
        pods.publish_all([plan.place(DISTINCT_STAGE, index, "npy")] for index in ranges)
    pods.fetch(plan.place(DISTINCT_STAGE, index, "npy") for index in own)
    run_stage(workers, "encoded", partial(encode_range, plan), [(index,) for index in own])
    pods.publish_all(stage_files(plan, encode_stage.STAGE, index) for index in own)
    prepared = None
    if is_first_pod:
        pods.fetch(path for index in ranges for path in stage_files(plan, encode_stage.STAGE, index))
        prepared = assign_and_summarize(plan)
        pods.publish_all([plan.place(SPLIT_STAGE, index, "npy")] for index in ranges)
        pods.publish(plan.work / PARTS_FILE)
    pods.fetch([*(plan.place(SPLIT_STAGE, index, "npy") for index in own), plan.work / PARTS_FILE])
    parts = tuple(json.loads((plan.work / PARTS_FILE).read_bytes()))
    if plan.parameters.features is not None:
        add_features(plan, workers, pods, own)
    shuffle = replace(shuffle, parts=sum(parts))
    run_stage(workers, "sorted", partial(scatter_range, plan, parts, shuffle), [(index,) for index in own])
    first, end = pods.unit_range(sum(parts), pods.rank)
    wanted = [number for number in range(first, end) if not pods.is_published(delivery_marker(plan, number))]
    buckets = spread_until_ready(plan, shuffle, workers, pods, groups, wanted)
    run_stage(workers, "written", partial(gather_part, plan, parts), buckets, noun="parts")
    return parts, prepared


def add_features(plan: Plan, workers: Workers, pods: Pods, own: Sequence[int]) -> None:
    """Fit the features to all records, and add them to this pod's records.

    Raises the errors of `feature_stages.build_state`.
    """
    run_stage(workers, "fitted", partial(feature_stages.fit_range, plan), [(index,) for index in own])
    pods.publish_all(feature_stages.fit_files(plan, index) for index in own)
    if pods.rank == 0:
        pods.fetch(path for index in range(len(plan.ranges)) for path in feature_stages.fit_files(plan, index))
        state = feature_stages.build_state(plan)  # before the keys, to report columns that cannot be fitted early
        run_stage(workers, "merged", partial(merge_tables, plan), feature_stages.list_pending_merges(plan), noun="tables")
        feature_stages.write_feature_files(plan, state)
        pods.publish(*feature_stages.feature_files(plan))
    pods.fetch(feature_stages.feature_files(plan))
    run_stage(workers, "computed", partial(compute_range, plan), [(index,) for index in own])


def stage_files(plan: Plan, stage: str, index: int) -> list[Path]:
    """Return a range's files that a pod publishes after a stage, in writing order."""
    signed = stage == read_stage.STAGE and plan.parameters.filter.near_dedup is not None
    return [plan.place(stage, index, suffix) for suffix in (SUMMARY_SUFFIX, *(("npy",) if signed else ()), "json")]


def spread_until_ready(
    plan: Plan, shuffle: ShufflePlan, workers: Workers, pods: Pods, groups: Sequence[int], wanted: Sequence[int]
) -> list[tuple[Bucket, int]]:
    """Return the wanted parts with the bucket to read each from.

    Buckets with too many runs are spread first.
    """
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
                smaller += shuffle.child_buckets(bucket)
        run_stage(workers, "spread", partial(spread_group, plan, shuffle), calls, noun="groups")
        if pods.count > 1 and waiting == [shuffle.root]:
            smaller = exchange_runs(plan, shuffle, pods, groups, wanted)
        waiting = smaller
    return ready


def assign_and_summarize(plan: Plan) -> PreparationSummary:
    """Make all decisions that depend on all records, and summarize them.

    Raises:
        BadConfiguration: no record is left, or the errors of `assign_records`.
    """
    rejected = write_rejected_records(plan.work / REJECTED_FILE, plan, iterate_rejects(plan))
    ranges = range(len(plan.ranges))
    lengths = [read_summary(plan, encode_stage.STAGE, index).num_rows for index in ranges]
    if not any(lengths):
        reasons = ", ".join(f"{count} {reason}" for reason, count in rejected.most_common()) or "the dataset is empty"
        raise BadConfiguration(f"no record is left: {reasons}{describe_first_reject(plan.work / REJECTED_FILE)}")
    decided = assign_records(plan, lengths)
    masked, filled, unread, retyped = Counter[str](), Counter[str](), Counter[str](), set[str]()
    lines = truncated = size = 0
    for index in ranges:  # one at a time: each holds its rejects, which may be as many as its records
        facts, encoded = read_facts(plan, index), read_encode_facts(plan, index)
        masked.update(facts.masked)
        filled.update(facts.filled)
        unread.update(facts.unread)
        retyped.update(facts.retyped)
        lines += facts.lines
        truncated += encoded.truncated
        size += encoded.size
    with atomic_path(plan.work / PARTS_FILE) as part:
        part.write_text(json.dumps(count_parts(decided, size, plan.part_bytes)), encoding="utf-8")
    return PreparationSummary(
        records=dict(zip(SPLITS, decided.records, strict=True)),
        rejected=dict(sorted(rejected.items())),
        masked=dict(sorted(masked.items())),
        oversampled=decided.oversampled,
        leaked=decided.leaked,
        truncated=truncated,
        retyped=tuple(sorted(retyped)),
        filled=dict(sorted(filled.items())),
        unread=dict(sorted(unread.items())),
        lines=lines,
    )


def run_stage(workers: Workers, done: str, unit: Unit, calls: Sequence[tuple[Any, ...]], noun: str = "ranges") -> None:
    """Run a stage, and log its progress periodically."""
    logged_at = time.monotonic()
    for number, _ in enumerate(workers.run(unit, calls), start=1):
        if time.monotonic() - logged_at > LOG_INTERVAL_SECONDS or number == len(calls):
            logged_at = time.monotonic()
            log_line(f"{done} {number} of {len(calls)} {noun}")


def mark_duplicates(plan: Plan) -> None:
    """Mark duplicates in each range.

    0 keeps a record, other values are the reason to drop it.
    """
    ranges, wanted, scratch = range(len(plan.ranges)), plan.parameters.filter, plan.scratch
    shutil.rmtree(scratch.folder, ignore_errors=True)  # of a killed process, which may have been further
    lengths = [read_summary(plan, read_stage.STAGE, index).num_rows for index in ranges]
    total = sum(lengths)
    with scratch.column("equal", np.int8, total, 0) as equal, scratch.column("near", np.int8, total, 0) as near:
        if wanted.dedup:
            digests = (digest_words(read_summary(plan, read_stage.STAGE, index).column("digest")) for index in ranges)
            for places in find_exact_duplicates(digests, total, scratch):
                equal.assign(places, DUPLICATE)
        if wanted.near_dedup is not None:
            signatures = [plan.place(read_stage.STAGE, index, "npy") for index in ranges]
            kept = (marks == 0 for marks in equal.runs(lengths))
            for places in find_near_duplicates(signatures, kept, total, wanted.near_dedup, scratch):
                near.assign(places, NEAR_DUPLICATE)
        for index, marks in enumerate(zip(equal.runs(lengths), near.runs(lengths), strict=True)):
            save_array(plan.place(DISTINCT_STAGE, index, "npy"), np.maximum(*marks))


def describe_first_reject(rejects: Path) -> str:
    """Describe the first reject, if any, for users whose preparation left no record."""
    with rejects.open(encoding="utf-8") as lines:
        line = lines.readline()
    if not line:
        return ""
    first = json.loads(line)
    return f"; the first: {first['file']}, line {first['line']}: {first['detail']}"


def iterate_rejects(plan: Plan) -> Iterator[tuple[int, list[Reject]]]:
    """Yield the number of lines of each range, and the rejects of all stages."""
    reasons = {DUPLICATE: "duplicate", NEAR_DUPLICATE: "near duplicate"}
    for index in range(len(plan.ranges)):
        facts = read_facts(plan, index)
        marks = np.load(plan.place(DISTINCT_STAGE, index, "npy"))
        lines = read_summary(plan, read_stage.STAGE, index).column("line").to_numpy()
        again = [Reject(int(lines[row]), reasons[int(marks[row])]) for row in np.flatnonzero(marks)]
        yield facts.lines, [*facts.rejects, *again, *read_encode_facts(plan, index).rejects]


def count_parts(decided: SplitDecision, size: int, part_bytes: int) -> PartCounts:
    """Return the number of files of each split, from the size of distinct records.

    Depends on the data alone.
    """
    each = size / decided.distinct
    return tuple(max(1, ceil(each * count / part_bytes)) for count in decided.records)
