"""Work more urgent than any job, which makes Kueue preempt.

It is a plain Job behind the installation's queue.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

from tests.cluster.cluster import GPU
from tests.cluster.images import JOB_IMAGE
from tests.cluster.installation import Installation

SECURITY = {
    "allowPrivilegeEscalation": False,
    "runAsNonRoot": True,
    "runAsUser": 1000,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


@contextmanager
def urgent_work(
    installation: Installation, gpus: int = 8, pods: int = 1, node_labels: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Hold so many GPUs in each pod until the block ends; yield the work's name.

    Kueue first makes room for it.
    """
    name = f"urgent-{uuid4().hex[:8]}"
    installation.cluster.apply(urgent_job(installation, name, gpus, pods, node_labels or {}))
    try:
        yield name
    finally:
        installation.cluster.kubectl("delete", "job", name, f"--namespace={installation.name}", "--wait=false")


def urgent_job(
    installation: Installation, name: str, gpus: int, pods: int, node_labels: Mapping[str, str]
) -> dict[str, Any]:
    scheduler = installation.settings.scheduler
    labels = {
        "kueue.x-k8s.io/queue-name": scheduler.queue,
        "kueue.x-k8s.io/priority-class": scheduler.priority_classes.high,
    }
    container = {
        "name": "sleep",
        "image": JOB_IMAGE,
        "command": ["sleep", "3600"],
        "resources": {"limits": {GPU: str(gpus)}},
        "securityContext": SECURITY,
    }
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 0,
        "nodeSelector": dict(node_labels),
        "tolerations": [{"key": GPU, "operator": "Exists"}],
        "containers": [container],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": installation.name, "labels": labels},
        "spec": {"suspend": True, "completions": pods, "parallelism": pods, "template": {"spec": spec}},
    }
