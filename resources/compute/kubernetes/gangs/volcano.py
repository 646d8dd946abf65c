"""Volcano: a PodGroup in a queue, whose pods its scheduler binds together."""

from typing import Any

from resources.compute.kubernetes.gang import Gang
from resources.compute.kubernetes.gangs.job_set import scheduled_job_set
from resources.compute.kubernetes.pod_manifest import metadata

GROUP_ANNOTATION = "scheduling.k8s.io/group-name"
SCHEDULER = "volcano"


def manifests(gang: Gang) -> list[dict[str, Any]]:
    group = {
        "apiVersion": "scheduling.volcano.sh/v1beta1",
        "kind": "PodGroup",
        "metadata": metadata(gang),
        "spec": {
            "minMember": gang.minimum_pods,
            "queue": gang.queue,
            "priorityClassName": gang.priority_class,
        },
    }
    return [group, scheduled_job_set(gang, SCHEDULER, {"annotations": {GROUP_ANNOTATION: gang.name}})]
