"""When a job that waits goes on as another generation: with fewer nodes, or with a Workload that Kueue queues again."""

import math
import re

from recipes.contracts.job import Job
from recipes.contracts.quantities import parse_duration
from resources.compute.kubernetes.phases import Snapshot

STUCK_MS = 120_000
"""A Workload that was evicted so long ago and still holds its quota is never queued again (kueue #14811)."""
MISSING_GPUS = re.compile(r"quota for nvidia\.com/gpu in flavor \S+, (\d+) more needed")
"""In Kueue's words for a Workload that waits."""


def is_stuck(snapshot: Snapshot) -> bool:
    """Whether Kueue has stopped the gang, and neither gives its quota back nor starts it."""
    gang, workload = snapshot.gang, snapshot.workload
    if gang is None or workload is None or not gang.suspended or snapshot.pods:
        return False
    return workload.holds_quota and bool(workload.evicted) and snapshot.now - workload.queued_at > STUCK_MS


def has_waited(snapshot: Snapshot, wait_seconds: float) -> bool:
    """Whether the gang has waited so long in the queue, since its submission or its last preemption."""
    gang, workload = snapshot.gang, snapshot.workload
    waits = gang is not None and gang.suspended and workload is not None and not workload.holds_quota
    return waits and workload is not None and snapshot.now - workload.queued_at >= wait_seconds * 1000


def shrink(job: Job, waits_for: str) -> Job | None:
    """The job on as many nodes as have room now, by Kueue's words; None where that is fewer than it accepts."""
    shape = job.distributed
    if shape is None or shape.elastic is None:
        return None
    gpus = shape.gpus_per_node if shape.backend == "nccl" else job.hardware.gpus
    missing = MISSING_GPUS.search(waits_for)
    nodes = shape.num_nodes - (math.ceil(int(missing[1]) / gpus) if missing and gpus else 1)
    if nodes < shape.elastic.min_nodes:
        return None
    elastic = shape.elastic if nodes > shape.elastic.min_nodes else None
    return job.model_copy(update={"distributed": shape.model_copy(update={"num_nodes": nodes, "elastic": elastic})})


def next_generation(snapshot: Snapshot, job: Job) -> Job | None:
    """The document of the next generation; None where the present one stays."""
    if is_stuck(snapshot):
        return job
    elastic = job.distributed and job.distributed.elastic
    if elastic and snapshot.workload and not snapshot.pods and has_waited(snapshot, parse_duration(elastic.wait)):
        return shrink(job, snapshot.workload.waits_for)
    return None
