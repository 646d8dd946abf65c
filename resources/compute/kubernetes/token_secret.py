"""Secret with the token of a job's pods. Not part of the ConfigMap, which everybody who sees the job may read."""

from typing import Any

from resources.compute.kubernetes.gang import Gang, annotations, labels

KEY = "token"
MASKED = "********"
"""In the place of a token in what is printed, as in `hanzo-ml config show`."""


def secret_name(gang: Gang) -> str:
    return token_name(gang.name)


def token_name(name: str) -> str:
    """Of the Secret of a gang that has this name."""
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
