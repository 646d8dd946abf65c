"""Retention of a failed job's pods, if the job requests it (`keep_failed`)."""

from collections.abc import Sequence
from datetime import UTC, datetime

from resources.compute.kubernetes.cluster import Item
from resources.compute.kubernetes.gang import JOB_LABEL, KEEP_ANNOTATION
from resources.compute.kubernetes.states import GangState, PodState, read_generation
from resources.metadata.cluster_jobs import ClusterJob
from resources.metadata.job_attempts import Attempt

ENDING_MS = 120_000
"""Time for the cluster to notice that pods of a failed attempt have ended: they exit after they have reported."""


def is_kept(config_map: Item, job: ClusterJob, gang: GangState | None, now: int, keep_ms: int) -> bool:
    """Return whether the objects of a generation are kept although its job failed.

    Only if the gang has ended by itself: pods that still wait or run hold GPUs. The ConfigMap identifies the generation.
    """
    wanted = KEEP_ANNOTATION in (config_map["metadata"].get("annotations") or {})
    is_newest = read_generation(config_map) == job.generation
    ended = gang is not None and gang.ended == "failed" and not gang.deleting
    return wanted and is_newest and job.has_ended and ended and now - job.updated_at < keep_ms


def is_ending(gang: GangState | None, newest: Attempt | None, now: int) -> bool:
    """Return whether the pods of a failed job are about to end.

    Pods to be kept must not be deleted before.
    """
    if gang is None or gang.ended or gang.deleting or gang.suspended:
        return False
    return newest is not None and newest.ended_at is not None and now - newest.ended_at < ENDING_MS


def describe_kept_pods(gang: GangState | None, pods: Sequence[PodState], until: int) -> str:
    """Describe how and until when to inspect kept pods; empty if none are kept."""
    ended = [pod for pod in pods if pod.has_ended]
    if gang is None or gang.ended != "failed" or not ended:
        return ""
    end, kubectl = datetime.fromtimestamp(until / 1000, UTC), f"kubectl -n {gang.namespace}"
    return (
        f"its pods are kept until {end:%Y-%m-%d %H:%M} UTC: `{kubectl} describe pods -l {JOB_LABEL}={ended[0].job}`, "
        f"`{kubectl} logs {ended[0].name}`"
    )
