"""Writes the Secrets with the tokens of jobs: whoever submits a job calls `ensure` before it, `hand_over` after it.

In this order, because a pod whose Secret is not there starts without a token, and only what exists can own. A supervisor
that dies in between finds the Secret again by its name, and goes on.
"""

import base64
from typing import TYPE_CHECKING

from resources.compute.credentials import Credentials
from resources.compute.kubernetes.gang import Gang
from resources.compute.kubernetes.token_secret import KEY, owned_by, secret_name, token_secret
from resources.jobs.credentials import TOKEN_VARIABLE

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
        found = self._found(gang)
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
        if self._found(gang) is not None:
            patch = owned_by(api_version, kind, gang.name, uid)
            self._core.patch_namespaced_secret(secret_name(gang), gang.namespace, patch)

    def _found(self, gang: Gang) -> "V1Secret | None":
        from kubernetes.client import ApiException  # takes a second, which only a cluster's supervisor pays

        try:
            return self._core.read_namespaced_secret(secret_name(gang), gang.namespace)
        except ApiException as problem:
            if problem.status == 404:
                return None
            raise


def token_in(secret: "V1Secret") -> str:
    return base64.b64decode((secret.data or {}).get(KEY, "")).decode()
