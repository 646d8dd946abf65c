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
"""Name of the only replicated job. Its pods are NAME-node-0-RANK, in the subdomain with the JobSet's name."""


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
    """Return a JobSet for a custom scheduler; `pod_metadata` names the PodGroup."""
    item = job_set(gang, {})
    spec = item["spec"]["replicatedJobs"][0]["template"]["spec"]
    # This clock restarts with each attempt; only our controller adds up the time over restarts.
    spec["activeDeadlineSeconds"] = gang.max_seconds
    over = {"name": "timedOut", "action": "FailJobSet", "onJobFailureReasons": ["DeadlineExceeded"]}
    item["spec"]["failurePolicy"]["rules"].append(over)
    template = spec["template"]
    template["spec"] |= {"schedulerName": scheduler, "priorityClassName": gang.priority_class}
    for part, more in pod_metadata.items():
        template["metadata"][part] = template["metadata"][part] | more
    return item


def failure_policy(*, keep_failed: bool) -> dict[str, Any]:
    """Return the failure policy of a JobSet.

    Final errors fail the job at once; anything else restarts the whole gang, uncounted for interruptions. With `keep_failed`
    a counted failure does not restart the gang, which would delete its pods: the controller recreates it, unless the attempt
    was the last.
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
    """Return the rule for a child Job that failed by its rule at index `place`.

    All such failures have the reason PodFailurePolicy; only the message distinguishes them (key of JobSet 0.10 and newer).
    """
    return {
        "name": name,
        "action": action,
        "onJobFailureReasons": ["PodFailurePolicy"],
        "onJobFailureMessagePatterns": [f"matching FailJob rule at index {place}$"],
    }
