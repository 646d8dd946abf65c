"""JobSet of a gang: created, restarted and deleted as a whole."""

from typing import Any

from resources.compute.kubernetes.gang import Gang, labels
from resources.compute.kubernetes.gangs.job_spec import (
    DISRUPTION_RULE,
    FINAL_RULE,
    MAX_JOB_RESTARTS,
    PREEMPTED_RULE,
    job_spec,
)
from resources.compute.kubernetes.pod_manifest import metadata

NODES = "node"
"""The one replicated job. Its pods are NAME-node-0-RANK, reachable below the JobSet's own name."""


def job_set(gang: Gang, more_labels: dict[str, str]) -> dict[str, Any]:
    rank_0 = f"{gang.name}-{NODES}-0-0.{gang.name}"
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata(gang, **more_labels),
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": gang.name, "publishNotReadyAddresses": True},
            "failurePolicy": failure_policy(keep_failed=gang.job.pod.keep_failed),
            "replicatedJobs": [
                {
                    "name": NODES,
                    "replicas": 1,
                    "template": {"metadata": {"labels": labels(gang.job)}, "spec": job_spec(gang, rank_0)},
                }
            ],
        },
    }


def scheduled_job_set(gang: Gang, scheduler: str, pod_metadata: dict[str, dict[str, str]]) -> dict[str, Any]:
    """A JobSet whose pods a scheduler of its own starts by their PodGroup, which `pod_metadata` names to it."""
    item = job_set(gang, {})
    spec = item["spec"]["replicatedJobs"][0]["template"]["spec"]
    # Nobody counts over restarts here but our controller; this clock starts again with each of them.
    spec["activeDeadlineSeconds"] = gang.max_seconds
    over = {"name": "timedOut", "action": "FailJobSet", "onJobFailureReasons": ["DeadlineExceeded"]}
    item["spec"]["failurePolicy"]["rules"].append(over)
    template = spec["template"]
    template["spec"] |= {"schedulerName": scheduler, "priorityClassName": gang.priority_class}
    for part, more in pod_metadata.items():
        template["metadata"][part] = template["metadata"][part] | more
    return item


def failure_policy(*, keep_failed: bool) -> dict[str, Any]:
    """Final errors fail the job at once; anything else restarts the whole gang, for interruptions without counting it.

    With `keep_failed` a gang that would count as failed is not restarted, because that deletes its pods: the controller
    creates it again, unless the attempt was the last.
    """
    return {
        "maxRestarts": 0 if keep_failed else MAX_JOB_RESTARTS,
        "rules": [
            rule("finalError", "FailJobSet", FINAL_RULE),
            rule("disruption", "RestartJobSetAndIgnoreMaxRestarts", DISRUPTION_RULE),
            rule("preempted", "RestartJobSetAndIgnoreMaxRestarts", PREEMPTED_RULE),
        ],
    }


def rule(name: str, action: str, place: int) -> dict[str, Any]:
    """What follows when the child's own rule at `place` failed it.

    Both have the reason PodFailurePolicy; only the message distinguishes them (a key of JobSet 0.10 and newer).
    """
    return {
        "name": name,
        "action": action,
        "onJobFailureReasons": ["PodFailurePolicy"],
        "onJobFailureMessagePatterns": [f"matching FailJob rule at index {place}$"],
    }
