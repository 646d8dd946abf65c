"""Health of a run worker, decided from its Kubernetes Job and pods."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from kubernetes.client import (
    V1ContainerState,
    V1ContainerStateTerminated,
    V1ContainerStateWaiting,
    V1ContainerStatus,
    V1Job,
    V1JobCondition,
    V1JobStatus,
    V1ObjectMeta,
    V1Pod,
    V1PodCondition,
    V1PodSpec,
    V1PodStatus,
)

from resources.orchestration.run_worker_health import worker_health

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def job(**status: Any) -> V1Job:
    return V1Job(metadata=V1ObjectMeta(name="run"), status=V1JobStatus(**status))


def pod(phase: str = "Running", *, deleted: datetime | None = None, state: Any = None, **status: Any) -> V1Pod:
    container = V1ContainerStatus(
        name="dagster", image="i", image_id="i", ready=True, restart_count=0, state=state or V1ContainerState()
    )
    return V1Pod(
        metadata=V1ObjectMeta(name="run-x", deletion_timestamp=deleted),
        spec=V1PodSpec(node_name="node-7", containers=[]),
        status=V1PodStatus(phase=phase, container_statuses=[container], **status),
    )


def waiting(reason: str, message: str) -> V1ContainerState:
    return V1ContainerState(waiting=V1ContainerStateWaiting(reason=reason, message=message))


def ended(code: int, reason: str) -> V1ContainerState:
    return V1ContainerState(terminated=V1ContainerStateTerminated(exit_code=code, reason=reason))


def condition(type: str, status: str, message: str) -> V1PodCondition:
    return V1PodCondition(type=type, status=status, message=message)


FAILED = V1JobCondition(type="Failed", status="True", reason="BackoffLimitExceeded", message="it has reached its limit")


@pytest.mark.parametrize(
    ("made", "pods", "detail"),
    [
        (job(active=1), [pod()], ""),
        (job(), [], "waits for its pod"),
        (
            job(active=1),
            [pod("Pending", state=waiting("ImagePullBackOff", "not found: hanzo/ml:9"))],
            "waits: ImagePullBackOff: not found: hanzo/ml:9",
        ),
        (
            job(active=1),
            [pod("Pending", conditions=[condition("PodScheduled", "False", "0/3 nodes are available")])],
            "waits: 0/3 nodes are available",
        ),
        (job(active=1), [pod(deleted=NOW + timedelta(seconds=10))], ""),
        (job(active=1), [pod(deleted=NOW - timedelta(minutes=9)), pod()], ""),
    ],
    ids=["running", "no pod yet", "image missing", "unschedulable", "terminating", "replaced"],
)
def test_worker_that_may_still_work_is_alive(made: V1Job, pods: list[V1Pod], detail: str) -> None:
    health = worker_health(made, pods, NOW)
    assert (health.alive, health.detail) == (True, detail)


@pytest.mark.parametrize(
    ("made", "pods", "detail", "leftovers"),
    [
        (None, [pod()], "its Job was deleted", True),
        (job(active=1), [pod(deleted=NOW - timedelta(minutes=1))], "its node node-7 does not answer any more", True),
        (
            job(failed=1, conditions=[FAILED]),
            [pod("Failed", conditions=[condition("DisruptionTarget", "True", "preempted by a pod")])],
            "its pod was evicted: preempted by a pod",
            False,
        ),
        (
            job(active=1),
            [pod("Failed", reason="Evicted", message="The node was low on resource: memory.")],
            "its pod ended: Evicted: The node was low on resource: memory.",
            False,
        ),
        (
            job(failed=1),
            [pod("Failed", state=ended(137, "OOMKilled"))],
            "its pod was killed because it exceeded its memory limit",
            False,
        ),
        (job(succeeded=1), [pod("Succeeded", state=ended(0, "Completed"))], "its process ended with exit code 0", False),
        (job(failed=1, conditions=[FAILED]), [], "its Job failed: it has reached its limit", False),
    ],
    ids=["Job deleted", "node lost", "preempted", "evicted", "out of memory", "exited", "pod deleted"],
)
def test_worker_that_is_gone_is_not_alive_and_the_reason_is_named(
    made: V1Job | None, pods: list[V1Pod], detail: str, leftovers: bool
) -> None:
    health = worker_health(made, pods, NOW)
    assert (health.alive, health.detail, health.has_leftovers) == (False, detail, leftovers)
