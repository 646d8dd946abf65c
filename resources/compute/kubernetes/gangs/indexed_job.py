"""Indexed Job: what a cluster without CRDs can do.

It is not a gang: the scheduler may start some of its pods, and nobody but our controller can restart all of them. So it
fails as soon as one pod does; only a job of a single pod restarts by itself (facts/kubernetes.md, pitfall 2), and one whose
pods find in the store what they need of each other.
"""

from typing import Any

from resources.compute.kubernetes.gang import Gang
from resources.compute.kubernetes.gangs.job_spec import job_spec
from resources.compute.kubernetes.pod_manifest import metadata


def manifests(gang: Gang) -> list[dict[str, Any]]:
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
