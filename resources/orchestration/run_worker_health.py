"""Decide from Job and pods whether a Kubernetes run worker is alive. Pure functions.

dagster-k8s checks only the Job, whose status ignores lost nodes: a pod there counts as active forever.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kubernetes.client import V1Job, V1Pod  # type: ignore[import-untyped]

LOST_AFTER = timedelta(seconds=5)
"""A pod counts as lost this long after its deletion was due: its kubelet does not respond."""
ENDED_CONDITIONS = ("Complete", "Failed", "FailureTarget", "SuccessCriteriaMet")
ENDED_PHASES = ("Succeeded", "Failed")


@dataclass(frozen=True)
class WorkerHealth:
    """Whether a worker can still do its work, and what prevents or delays it.

    `has_leftovers`: parts of a lost worker could still start or run.
    """

    alive: bool
    detail: str = ""
    has_leftovers: bool = False


def worker_health(job: "V1Job | None", pods: Sequence["V1Pod"], now: datetime) -> WorkerHealth:
    """Return the health of an unfinished run's worker, from its Job and pods."""
    if job is None:
        return WorkerHealth(False, "its Job was deleted", has_living_pods(pods))
    living = [pod for pod in pods if not has_pod_ended(pod)]
    if living:
        lost = [pod for pod in living if is_lost(pod, now)]
        if len(lost) == len(living):
            return WorkerHealth(False, f"its node {lost[0].spec.node_name} does not answer any more", True)
        return WorkerHealth(True, next(filter(None, map(waiting_detail, living)), ""))
    if pods or has_ended(job):
        reason = next(filter(None, map(end_reason, pods)), None) or job_end_reason(job)
        return WorkerHealth(False, reason or "its pod is gone")
    return WorkerHealth(True, "waits for its pod")  # the Job controller has not created it yet


def has_living_pods(pods: Iterable["V1Pod"]) -> bool:
    return not all(map(has_pod_ended, pods))


def has_pod_ended(pod: "V1Pod") -> bool:
    return pod.status.phase in ENDED_PHASES


def is_lost(pod: "V1Pod", now: datetime) -> bool:
    """Whether the deletion of a pod is overdue.

    The deletion timestamp is the end of the grace period. A pod that still exists later is on a node whose kubelet is gone:
    Kubernetes evicts it when its tolerations expire, but the kubelet never confirms.
    """
    due = pod.metadata.deletion_timestamp
    return due is not None and now - due > LOST_AFTER


def has_ended(job: "V1Job") -> bool:
    """Whether a Job will start no further pod; a run is retried as another run."""
    conditions = job.status.conditions or []
    if any(condition.type in ENDED_CONDITIONS and condition.status == "True" for condition in conditions):
        return True
    return not job.status.active and bool(job.status.failed or job.status.succeeded)


def end_reason(pod: "V1Pod") -> str:
    """Return why a pod ended: evicted, preempted, out of memory, or its exit code."""
    for condition in pod.status.conditions or []:
        if condition.type == "DisruptionTarget" and condition.status == "True":
            return f"its pod was evicted: {condition.message or condition.reason}"
    if pod.status.reason:
        return f"its pod ended: {': '.join(filter(None, (pod.status.reason, pod.status.message)))}"
    for container in pod.status.container_statuses or []:
        if ended := container.state.terminated if container.state else None:
            if ended.reason == "OOMKilled":
                return "its pod was killed because it exceeded its memory limit"
            return f"its process ended with exit code {ended.exit_code}"
    return ""


def job_end_reason(job: "V1Job") -> str:
    failed = (condition for condition in job.status.conditions or [] if condition.type == "Failed")
    return next((f"its Job failed: {condition.message or condition.reason}" for condition in failed), "")


def waiting_detail(pod: "V1Pod") -> str:
    """Return what keeps a pod from starting, as reported by scheduler or container runtime."""
    for container in pod.status.container_statuses or []:
        if waiting := container.state.waiting if container.state else None:
            return f"waits: {': '.join(filter(None, (waiting.reason, waiting.message)))}"
    for condition in pod.status.conditions or []:
        if condition.type == "PodScheduled" and condition.status == "False":
            return f"waits: {condition.message or condition.reason}"
    return ""
