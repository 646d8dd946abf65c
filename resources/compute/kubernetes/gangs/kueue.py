"""Kueue: a suspended JobSet in a LocalQueue, admitted, preempted and resumed as a whole (rows H3, J3, J7)."""

from typing import Any

from resources.compute.kubernetes.gang import Gang
from resources.compute.kubernetes.gangs.job_set import job_set
from resources.compute.kubernetes.states import PRIORITY_LABEL

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
MAX_SECONDS_LABEL = "kueue.x-k8s.io/max-exec-time-seconds"
"""Kueue's clock adds up over preemptions; a Job's own would start again with each."""


def manifests(gang: Gang) -> list[dict[str, Any]]:
    labels = {QUEUE_LABEL: gang.queue, PRIORITY_LABEL: gang.priority_class, MAX_SECONDS_LABEL: str(gang.max_seconds)}
    item = job_set(gang, labels)
    # Kueue starts it on admission, and suspends it again when it is preempted.
    item["spec"] = {"suspend": True, **item["spec"]}
    return [item]
