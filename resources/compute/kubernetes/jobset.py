"""A JobSet behind Kueue: admitted whole or not at all, preempted whole, restarted whole (rows H3, J3, J7; facts)."""

from typing import Any

from resources.compute.base import MAX_RESTARTS
from resources.compute.kubernetes.gang import Gang
from resources.compute.kubernetes.indexed_job import DISRUPTION_RULE, EXIT_RULE, job_spec
from resources.compute.kubernetes.names import labels
from resources.compute.kubernetes.pod import metadata

NODES = "node"
"""The one replicated job. Its pods are NAME-node-0-RANK, reachable below the JobSet's own name."""


def job_set(gang: Gang) -> dict[str, Any]:
    rank_0 = f"{gang.name}-{NODES}-0-0.{gang.name}"
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata(gang, **kueue_labels(gang)),
        "spec": {
            # Kueue starts it on admission, and suspends it again when it is preempted.
            "suspend": True,
            "network": {"enableDNSHostnames": True, "subdomain": gang.name, "publishNotReadyAddresses": True},
            "failurePolicy": failure_policy(),
            "replicatedJobs": [
                {
                    "name": NODES,
                    "replicas": 1,
                    "template": {"metadata": {"labels": labels(gang.job)}, "spec": job_spec(gang, rank_0)},
                }
            ],
        },
    }


def kueue_labels(gang: Gang) -> dict[str, str]:
    return {
        "kueue.x-k8s.io/queue-name": gang.queue,
        "kueue.x-k8s.io/priority-class": gang.priority_class,
        # Kueue's clock adds up over preemptions; the Job's own would start again with each.
        "kueue.x-k8s.io/max-exec-time-seconds": str(gang.max_seconds),
    }


def failure_policy() -> dict[str, Any]:
    """Bad configuration ends the job, an evicted pod costs nothing, any other failure one restart of the whole gang."""
    return {
        "maxRestarts": MAX_RESTARTS,
        "rules": [
            rule("badConfiguration", "FailJobSet", EXIT_RULE),
            rule("disruption", "RestartJobSetAndIgnoreMaxRestarts", DISRUPTION_RULE),
        ],
    }


def rule(name: str, action: str, place: int) -> dict[str, Any]:
    """What follows when the child's own rule at `place` failed it.

    Both have the reason PodFailurePolicy; only the message tells them apart (a key of JobSet 0.10 and newer).
    """
    return {
        "name": name,
        "action": action,
        "onJobFailureReasons": ["PodFailurePolicy"],
        "onJobFailureMessagePatterns": [f"matching FailJob rule at index {place}$"],
    }
