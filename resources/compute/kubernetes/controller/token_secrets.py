"""Secrets with the tokens of programs: one token for each, however often its creation is tried."""

import logging
from collections.abc import Collection

from recipes.contracts.job import Job
from resources.compute.kubernetes.cluster import AlreadyExists, Cluster, Item
from resources.compute.kubernetes.token_secret import KEY
from resources.jobs.job_tokens import TOKEN_VARIABLE
from resources.jobs.program_tokens import ClusterCredentials
from resources.metadata.cluster_jobs import GenerationKey

log = logging.getLogger(__name__)


class TokenSecrets:
    def __init__(self, cluster: Cluster, credentials: ClusterCredentials) -> None:
        self._cluster = cluster
        self._credentials = credentials
        self._issued: dict[GenerationKey, str] = {}
        """Tokens of Secrets whose creation failed, or may have: the next attempt uses the same."""

    def create(self, key: GenerationKey, item: Item, job: Job) -> None:
        """Create a Secret with a token. One that exists stays: pods have read it, and its token is renewed.

        Raises:
            ClusterError: as `Cluster.create` does.
        """
        is_new = key not in self._issued
        if is_new:
            self._issued[key] = self._credentials.issue(job)[TOKEN_VARIABLE]
        try:
            self._cluster.create(item | {"stringData": {KEY: self._issued[key]}})
        except AlreadyExists:
            log.info("Secret %s exists, its token stays", item["metadata"]["name"])
            if is_new:
                self._credentials.withdraw(self._issued[key])
        del self._issued[key]

    def forget(self, active: Collection[GenerationKey]) -> None:
        """Drop what is cached of all other jobs: their tokens are revoked with their objects."""
        for key in self._issued.keys() - active:
            del self._issued[key]
