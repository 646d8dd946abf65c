"""Kueue: a JobSet in a LocalQueue, admitted, preempted and resumed as a whole."""

from typing import Any

from resources.compute.kubernetes.gang import Gang
from resources.compute.kubernetes.gangs.job_set import job_set
from resources.compute.kubernetes.states import PRIORITY_LABEL

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
MAX_SECONDS_LABEL = "kueue.x-k8s.io/max-exec-time-seconds"
"""Kueue adds up the time over preemptions; a Job's own clock would restart with each."""


def manifests(gang: Gang) -> list[dict[str, Any]]:
    labels = {QUEUE_LABEL: gang.queue, PRIORITY_LABEL: gang.priority_class, MAX_SECONDS_LABEL: str(gang.max_seconds)}
    item = job_set(gang, labels)
    # Kueue starts it on admission and suspends it again on preemption.
    item["spec"] = {"suspend": True, **item["spec"]}
    return [item]
