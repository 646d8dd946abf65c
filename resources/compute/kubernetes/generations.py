"""Decide when to recreate a waiting job as a new generation.

It gets fewer nodes, or a new Workload that Kueue queues again. A job waits in the queue, or with unschedulable pods.
"""

import math
import re

from recipes.contracts.job import Job
from recipes.contracts.quantities import parse_duration
from resources.compute.kubernetes.phases import Snapshot, find_admission

STUCK_MS = 120_000
"""A Workload that still holds its quota this long after its eviction is never queued again (kueue #14811)."""
MISSING_GPUS = re.compile(r"quota for nvidia\.com/gpu in flavor \S+, (\d+) more needed")
"""Part of Kueue's message for a waiting Workload."""


def is_stuck(snapshot: Snapshot) -> bool:
    """Return whether Kueue stopped the gang but neither frees its quota nor starts it."""
    gang, workload = snapshot.gang, snapshot.workload
    if gang is None or workload is None or not gang.suspended or snapshot.pods:
        return False
    return workload.holds_quota and bool(workload.evicted) and snapshot.now - workload.queued_at > STUCK_MS


def has_waited(snapshot: Snapshot, wait_seconds: float) -> bool:
    """Return whether the gang has queued this long since submission or preemption."""
    gang, workload = snapshot.gang, snapshot.workload
    waits = gang is not None and gang.suspended and workload is not None and not workload.holds_quota
    return waits and workload is not None and snapshot.now - workload.queued_at >= wait_seconds * 1000


def count_unplaced_pods(snapshot: Snapshot, wait_seconds: float) -> int:
    """Count pods of an admitted gang that were unschedulable for `wait_seconds`.

    For example after a node was lost, which the quota does not account for. The wait is measured from when all nodes last
    ran, or from the admission, and continues over restarts of the gang: its scheduled pods give up eventually.
    """
    gang = snapshot.gang
    if gang is None or gang.suspended or any(pod.deleting for pod in snapshot.pods):
        return 0
    complete = next((found for found in reversed(snapshot.attempts) if found.is_registered), None)
    if complete is not None and complete.ended_at is None:
        return 0
    since = max(find_admission(snapshot) or snapshot.now, (complete and complete.ended_at) or 0)
    if snapshot.now - since < wait_seconds * 1000:
        return 0
    return sum(bool(pod.unschedulable) for pod in snapshot.current_pods)


def count_missing_nodes(job: Job, waits_for: str) -> int:
    """Return how many nodes lack capacity according to Kueue's message.

    One if the message does not say how many GPUs are missing.
    """
    assert job.distributed is not None
    gpus = job.distributed.gpus_per_node if job.distributed.backend == "nccl" else job.hardware.gpus
    missing = MISSING_GPUS.search(waits_for)
    return math.ceil(int(missing[1]) / gpus) if missing and gpus else 1


def shrink(job: Job, missing_nodes: int) -> Job | None:
    """Return the job without the missing nodes; None if fewer than it accepts remain."""
    shape = job.distributed
    if shape is None or shape.elastic is None:
        return None
    nodes = shape.num_nodes - missing_nodes
    if nodes < shape.elastic.min_nodes:
        return None
    elastic = shape.elastic if nodes > shape.elastic.min_nodes else None
    return job.model_copy(update={"distributed": shape.model_copy(update={"num_nodes": nodes, "elastic": elastic})})


def next_generation(snapshot: Snapshot, job: Job) -> Job | None:
    """Return the job of the next generation; None if the present one stays."""
    if is_stuck(snapshot):
        return job
    elastic, workload = job.distributed and job.distributed.elastic, snapshot.workload
    if not elastic:
        return None
    wait_seconds = parse_duration(elastic.wait)
    if workload is not None and not snapshot.pods and has_waited(snapshot, wait_seconds):
        return shrink(job, count_missing_nodes(job, workload.waits_for))
    unplaced = count_unplaced_pods(snapshot, wait_seconds)
    return shrink(job, unplaced) if unplaced else None
