"""The Secret that hands a job its own token: beside the job, read by its pods alone, gone with it.

Not part of the ConfigMap, which everybody who sees the job may read. What belongs here: what the Secret looks like. Who
writes it and when: `token_keeper`.
"""

from typing import Any

from resources.compute.kubernetes.gang import Gang
from resources.compute.kubernetes.names import annotations, labels

KEY = "token"
MASKED = "********"
"""In the place of a token in what is printed, as in `hanzo-ml config show`."""


def secret_name(gang: Gang) -> str:
    return f"{gang.name}-token"


def token_secret(gang: Gang, token: str = MASKED) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": secret_name(gang),
            "namespace": gang.namespace,
            "labels": labels(gang.job),
            "annotations": annotations(gang.job),
        },
        "type": "Opaque",
        "stringData": {KEY: token},
    }


def owned_by(api_version: str, kind: str, name: str, uid: str) -> dict[str, Any]:
    """The patch that has the cluster delete an object together with the job that owns it."""
    owner = {"apiVersion": api_version, "kind": kind, "name": name, "uid": uid}
    return {"metadata": {"ownerReferences": [owner]}}
