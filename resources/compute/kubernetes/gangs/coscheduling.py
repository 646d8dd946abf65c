"""Coscheduling plugin of kube-scheduler: a PodGroup whose pods are bound together."""

from typing import Any

from recipes.launch.pod import RENDEZVOUS_SECONDS
from resources.compute.kubernetes.gang import Gang
from resources.compute.kubernetes.gangs.job_set import scheduled_job_set
from resources.compute.kubernetes.pod_manifest import metadata

GROUP_LABEL = "scheduling.x-k8s.io/pod-group"


def manifests(gang: Gang) -> list[dict[str, Any]]:
    group = {
        "apiVersion": "scheduling.x-k8s.io/v1alpha1",
        "kind": "PodGroup",
        "metadata": metadata(gang),
        "spec": {
            "minMember": gang.minimum_pods,
            # How long nodes are reserved while the rest of the gang is not placed.
            "scheduleTimeoutSeconds": RENDEZVOUS_SECONDS,
        },
    }
    return [group, scheduled_job_set(gang, gang.coscheduler, {"labels": {GROUP_LABEL: gang.name}})]
