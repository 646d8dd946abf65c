"""Secret with the token of a job's pods.

It is separate from the ConfigMap, which every user with access to the job may read.
"""

from typing import Any

from resources.compute.kubernetes.gang import Gang, annotations, labels

KEY = "token"
MASKED = "********"
"""Printed instead of a token, as in `hanzo-ml config show`."""


def secret_name(gang: Gang) -> str:
    return token_name(gang.name)


def token_name(name: str) -> str:
    """Return the name of a gang's Secret."""
    return f"{name}-token"


def token_secret(gang: Gang, token: str = MASKED) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": secret_name(gang),
            "namespace": gang.namespace,
            "labels": labels(gang.job),
            "annotations": annotations(gang.job, gang.generation),
        },
        "type": "Opaque",
        "stringData": {KEY: token},
    }
