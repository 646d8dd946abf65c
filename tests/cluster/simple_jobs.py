"""Indexed Jobs of tests, under the restricted Pod Security profile."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from tests.cluster.cluster import GPU
from tests.cluster.dependencies import CLAIM
from tests.cluster.images import DEPENDENCIES, JOB_IMAGE


def unique(prefix: str) -> str:
    return f"{prefix}-{uuid4().hex[:8]}"


def job(
    name: str,
    namespace: str,
    command: list[str],
    *,
    pods: int = 1,
    gpus: int = 0,
    env: list[dict[str, Any]] | None = None,
    subdomain: str | None = None,
) -> dict[str, Any]:
    """An Indexed Job under the restricted Pod Security profile, with the dependencies mounted."""
    resources = {"cpu": "100m", "memory": "512Mi"} | ({GPU: str(gpus)} if gpus else {})
    container = {
        "name": "program",
        "image": JOB_IMAGE,
        "command": command,
        "env": env or [],
        "resources": {"requests": resources, "limits": resources | {"cpu": "2"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": CLAIM, "mountPath": DEPENDENCIES, "readOnly": True}],
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 10001, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": [{"name": CLAIM, "persistentVolumeClaim": {"claimName": CLAIM, "readOnly": True}}],
    }
    if subdomain:
        pod["subdomain"] = subdomain
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "completionMode": "Indexed",
            "completions": pods,
            "parallelism": pods,
            "backoffLimit": 0,
            "template": {"spec": pod},
        },
    }
