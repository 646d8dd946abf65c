"""Indexed batch/v1 Job of a gang: one pod per rank, and its pod failure policy."""

from typing import Any

from recipes.contracts.exit_reason import EXIT_ERROR
from recipes.contracts.job import EXIT_BAD_CONFIGURATION, EXIT_PREEMPTED
from resources.compute.kubernetes.gang import Gang
from resources.compute.kubernetes.pod_manifest import CONTAINER, pod_template

# It is the child of a JobSet, or used alone on a cluster without CRDs (see `indexed_job`).

FINAL_EXIT_CODES = [EXIT_ERROR, EXIT_BAD_CONFIGURATION]
"""Exit codes that no restart would change. In ascending order: the API server rejects the child of a JobSet otherwise."""
FINAL_RULE, DISRUPTION_RULE, PREEMPTED_RULE = 0, 1, 2
"""Indexes of the rules below; the message of a failed Job contains the index of the rule that failed it."""
MAX_JOB_RESTARTS = 100_000
"""The controller enforces the limit of counted attempts, which JobSet cannot distinguish: its own limit is never reached."""


def job_spec(gang: Gang, rank_0: str, subdomain: str | None = None, *, alone: bool = False) -> dict[str, Any]:
    """Return the `spec` of a batch/v1 Job."""
    # A restart deletes no pod of a plain Job, but our ending it would: pods to be kept must fail the Job itself.
    by_itself = alone and (gang.nodes == 1 or gang.shares) and not gang.job.pod.keep_failed
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": gang.nodes,
        "parallelism": gang.nodes,
        "backoffLimit": MAX_JOB_RESTARTS if by_itself else 0,
        "podFailurePolicy": pod_failure_policy("Ignore" if by_itself else "FailJob"),
        "template": pod_template(gang, rank_0, subdomain),
    }
    if alone:
        # This clock restarts with each attempt; without Kueue, nothing in the cluster adds up the time over restarts.
        spec["activeDeadlineSeconds"] = gang.max_seconds
    return spec


def pod_failure_policy(interrupted: str) -> dict[str, Any]:
    """Return the pod failure policy; final errors fail the Job.

    `interrupted` is the action for evicted pods and for those that saved a checkpoint.
    """
    return {
        "rules": [
            {"action": "FailJob", "onExitCodes": exit_codes(FINAL_EXIT_CODES)},
            {"action": interrupted, "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {"action": interrupted, "onExitCodes": exit_codes([EXIT_PREEMPTED])},
        ]
    }


def exit_codes(values: list[int]) -> dict[str, Any]:
    return {"containerName": CONTAINER, "operator": "In", "values": values}
