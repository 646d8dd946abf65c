"""An Indexed Job: one pod for each node, by rank. The child of a JobSet, and alone what a cluster without CRDs can do.

Alone it is not a gang: the scheduler may start some of its pods, and nothing but whoever follows it can restart all of them.
So it fails as soon as one pod does; only a job of a single pod restarts by itself (facts/kubernetes.md, pitfall 2), and one
whose pods find in the store what they need of each other.
"""

from typing import Any

from recipes.contracts.job import EXIT_BAD_CONFIGURATION
from resources.compute.base import MAX_RESTARTS
from resources.compute.kubernetes.gang import Gang
from resources.compute.kubernetes.pod import CONTAINER, metadata, pod_template

EXIT_RULE, DISRUPTION_RULE = 0, 1
"""Places of the two rules below; the reason of a failed Job names the place of the rule that failed it."""


def job_spec(gang: Gang, rank_0: str, subdomain: str | None = None, *, alone: bool = False) -> dict[str, Any]:
    """The `spec` of a batch/v1 Job."""
    by_itself = alone and (gang.nodes == 1 or gang.shares)
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": gang.nodes,
        "parallelism": gang.nodes,
        "backoffLimit": MAX_RESTARTS if by_itself else 0,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [EXIT_BAD_CONFIGURATION]},
                },
                {
                    "action": "Ignore" if by_itself else "FailJob",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                },
            ]
        },
        "template": pod_template(gang, rank_0, subdomain),
    }
    if alone:
        # Without Kueue nobody counts over restarts. This clock starts again with each of them.
        spec["activeDeadlineSeconds"] = gang.max_seconds
    return spec


def without_crds(gang: Gang) -> list[dict[str, Any]]:
    """The Service that gives the pods host names, where they look for each other; then the Job."""
    named = gang.nodes > 1 and not gang.shares
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(gang),
        "spec": job_spec(gang, f"{gang.name}-0.{gang.name}", gang.name if named else None, alone=True),
    }
    return [headless_service(gang), job] if named else [job]


def headless_service(gang: Gang) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(gang),
        "spec": {
            "clusterIP": "None",
            "selector": {"batch.kubernetes.io/job-name": gang.name},
            "publishNotReadyAddresses": True,  # ranks look for each other before any of them is ready
        },
    }
