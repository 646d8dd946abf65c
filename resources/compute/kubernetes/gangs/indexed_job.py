"""Indexed Job, for clusters without CRDs.

It is not a real gang: the scheduler may start only some of its pods, and only our controller can restart all of them.
Therefore it fails as soon as one pod fails. A job of a single pod, or whose pods cooperate only through the store, restarts
by itself.
"""

from typing import Any

from resources.compute.kubernetes.gang import Gang
from resources.compute.kubernetes.gangs.job_spec import job_spec
from resources.compute.kubernetes.pod_manifest import metadata


def manifests(gang: Gang) -> list[dict[str, Any]]:
    """Return the Service for the pods' host names, if needed, and the Job."""
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
            "publishNotReadyAddresses": True,  # ranks resolve each other before any of them is ready
        },
    }
