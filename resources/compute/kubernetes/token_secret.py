"""Secret with a job's token: how it is rendered, written and owned."""

import base64
from typing import TYPE_CHECKING, Any

from resources.compute.credentials import Credentials
from resources.compute.kubernetes.gang import Gang, annotations, labels
from resources.jobs.job_tokens import TOKEN_VARIABLE

# The Secret that hands a job its own token: beside the job, read by its pods alone, gone with it.
#
# Not part of the ConfigMap, which everybody who sees the job may read. `TokenKeeper` writes it.

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
            "annotations": annotations(gang.job, gang.generation),
        },
        "type": "Opaque",
        "stringData": {KEY: token},
    }


def owned_by(api_version: str, kind: str, name: str, uid: str) -> dict[str, Any]:
    """The patch that has the cluster delete an object together with the job that owns it."""
    owner = {"apiVersion": api_version, "kind": kind, "name": name, "uid": uid}
    return {"metadata": {"ownerReferences": [owner]}}


# Writes the Secrets with the tokens of jobs: whoever submits a job calls `ensure` before it, `hand_over` after it.
#
# In this order, because a pod whose Secret is not there starts without a token, and only what exists can own. A
# supervisor that dies in between finds the Secret again by its name, and goes on.

if TYPE_CHECKING:
    from kubernetes.client import CoreV1Api, V1Secret  # type: ignore[import-untyped]


class TokenKeeper:
    """Of the jobs on one cluster."""

    def __init__(self, core: "CoreV1Api", credentials: Credentials) -> None:
        self._core = core
        self._credentials = credentials

    def ensure(self, gang: Gang) -> None:
        """A job that is about to start, or runs already, has a Secret with a token that is good.

        The one that it has stays as it is, because running pods have read it. A job that logs to nobody has none.

        Raises:
            kubernetes.client.ApiException: the cluster does not allow it or does not answer.
        """
        if gang.job.tracking is None:
            return
        found = self._find_secret(gang)
        if found is not None and self._credentials.is_valid(gang.job, token_in(found)):
            self._credentials.renew(gang.job)
            return
        if token := self._credentials.issue(gang.job).get(TOKEN_VARIABLE):
            secret = token_secret(gang, token)
            if found is None:
                self._core.create_namespaced_secret(gang.namespace, secret)
            else:
                self._core.replace_namespaced_secret(secret_name(gang), gang.namespace, secret)

    def hand_over(self, gang: Gang, api_version: str, kind: str, uid: str) -> None:
        """The job that was just made, known by its uid, owns its Secret: deleting the one deletes the other."""
        if self._find_secret(gang) is not None:
            patch = owned_by(api_version, kind, gang.name, uid)
            self._core.patch_namespaced_secret(secret_name(gang), gang.namespace, patch)

    def _find_secret(self, gang: Gang) -> "V1Secret | None":
        from kubernetes.client import ApiException  # takes a second, which only a cluster's supervisor pays

        try:
            return self._core.read_namespaced_secret(secret_name(gang), gang.namespace)
        except ApiException as problem:
            if problem.status == 404:
                return None
            raise


def token_in(secret: "V1Secret") -> str:
    return base64.b64decode((secret.data or {}).get(KEY, "")).decode()
