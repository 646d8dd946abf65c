"""batch/v1 Job of a gang: one pod for each node by rank, and what its exit codes mean."""

from typing import Any

from recipes.contracts.exit_reason import EXIT_ERROR
from recipes.contracts.job import EXIT_BAD_CONFIGURATION, EXIT_PREEMPTED
from resources.compute.kubernetes.gang import Gang
from resources.compute.kubernetes.pod_manifest import CONTAINER, pod_template

# An Indexed Job: one pod for each node, by rank. The child of a JobSet, and alone what a cluster without CRDs can do.
#
# Alone it is not a gang: the scheduler may start some of its pods, and only the controller can restart all of
# them. So it fails as soon as one pod does; only a job of a single pod restarts by itself (facts/kubernetes.md, pitfall
# 2), and one whose pods find in the store what they need of each other.

FINAL_EXIT_CODES = [EXIT_ERROR, EXIT_BAD_CONFIGURATION]
"""Exit codes that no restart would change. In ascending order: else the API server refuses the child of a JobSet."""
FINAL_RULE, DISRUPTION_RULE, PREEMPTED_RULE = 0, 1, 2
"""Places of the rules below; the message of a failed Job names the place of the rule that failed it."""
MAX_JOB_RESTARTS = 100_000
"""The controller enforces the limit of counted attempts, which JobSet cannot distinguish: its own limit is never reached."""


def job_spec(gang: Gang, rank_0: str, subdomain: str | None = None, *, alone: bool = False) -> dict[str, Any]:
    """The `spec` of a batch/v1 Job."""
    # A restart deletes no pod of a plain Job, but its end by us would: pods that are to be kept must fail the Job itself.
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
        # Without Kueue nobody counts over restarts. This clock starts again with each of them.
        spec["activeDeadlineSeconds"] = gang.max_seconds
    return spec


def pod_failure_policy(interrupted: str) -> dict[str, Any]:
    """Final errors fail the Job, whatever else; `interrupted` is the action for evicted pods and those that saved."""
    return {
        "rules": [
            {"action": "FailJob", "onExitCodes": exit_codes(FINAL_EXIT_CODES)},
            {"action": interrupted, "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {"action": interrupted, "onExitCodes": exit_codes([EXIT_PREEMPTED])},
        ]
    }


def exit_codes(values: list[int]) -> dict[str, Any]:
    return {"containerName": CONTAINER, "operator": "In", "values": values}
