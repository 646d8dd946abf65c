"""From the runs of a bucket to those of smaller buckets, in one pod or in all of them."""

from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from recipes.preparation.plan import Plan, written
from recipes.preparation.pods import Pods
from recipes.preparation.runs import PART, Run, merged, write_run
from recipes.preparation.shuffle_plan import Bucket, Shuffle

SCATTERED = "scatter"
SPREAD = "spread"


def run_of(plan: Plan, bucket: Bucket, number: int) -> Path:
    """Where run `number` of a bucket lies: what a range has, or what a group of runs of a larger bucket had for it."""
    if bucket.level == 0:
        return plan.place(SCATTERED, number, "arrow")
    return plan.work / SPREAD / f"{bucket.level}" / f"{bucket.first:06}" / f"{number:06}.arrow"


def runs_of(plan: Plan, bucket: Bucket) -> tuple[Path, ...]:
    return tuple(run_of(plan, bucket, number) for number in range(bucket.files))


def is_spread(plan: Plan, level: int, first: int, group: int) -> Path:
    """Left when a group of runs of a bucket was spread."""
    return plan.work / SPREAD / f"{level}" / f"{first:06}" / f"{group:06}.done"


def spread(plan: Plan, shuffle: Shuffle, bucket: Bucket, group: int) -> None:
    """Write what group `group` of a bucket's runs has for each smaller bucket, as a run of that."""
    done = is_spread(plan, bucket.level, bucket.first, group)
    if done.is_file():
        return
    runs = [Run(run_of(plan, bucket, number)) for number in shuffle.groups(bucket)[group]]
    for number, smaller in enumerate(shuffle.smaller(bucket)):
        slices = [run.of(number) for run in runs]
        borders = shuffle.borders(smaller)
        starts = sum(np.searchsorted(part.column(PART).to_numpy(), borders) for part in slices)
        records = merged(slices, [run.record_bytes for run in runs], plan.part_bytes)
        write_run(run_of(plan, smaller, group), runs[0].table.schema, np.asarray(starts), records)
    with written(done) as part:
        part.touch()


def exchange(plan: Plan, shuffle: Shuffle, pods: Pods, groups: Sequence[int], wanted: Sequence[int]) -> list[Bucket]:
    """Give the pods what groups of this one's ranges have for them, and take all runs of the buckets with wanted parts.

    Returns these.
    """
    buckets = shuffle.smaller(shuffle.root)
    mine = {bucket for bucket in buckets if bisect_left(wanted, bucket.first) < bisect_left(wanted, bucket.end)}
    for group in groups:
        runs = {path: bucket for bucket in buckets if (path := run_of(plan, bucket, group)).is_file()}
        pods.give_all([path] for path in runs)  # another was given before this pod was started again
        for path, bucket in runs.items():
            if bucket not in mine:
                path.unlink()
        pods.give(is_spread(plan, 0, 0, group))
    pods.take(path for bucket in mine for path in runs_of(plan, bucket))
    return sorted(mine, key=lambda bucket: bucket.first)
