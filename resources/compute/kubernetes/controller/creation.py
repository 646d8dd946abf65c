"""When the objects of a job are created: once its earlier pods are gone, a few jobs per pass, and again after a refusal."""

import logging
import time
from collections.abc import Collection
from dataclasses import replace

from recipes.contracts.exit_reason import ExitReason
from recipes.contracts.job import BadConfiguration, Job
from recipes.contracts.quantities import pluralize
from resources.compute.base import Phase
from resources.compute.kubernetes.cluster import Cluster, ClusterError, InvalidObject
from resources.compute.kubernetes.controller.token_secrets import TokenSecrets
from resources.compute.kubernetes.phases import Snapshot, used_ms
from resources.compute.kubernetes.submission import create_objects
from resources.compute.kubernetes.view import ClusterView
from resources.jobs.program_tokens import ClusterCredentials
from resources.metadata.cluster_jobs import GenerationKey, JobState
from resources.settings.scheduler import Scheduler

log = logging.getLogger(__name__)

MAX_CREATIONS = 10
"""Jobs whose objects are created in one pass: the others' phases do not wait for hundreds that were submitted at once."""
RETRY_SECONDS = 5.0
"""Pause before objects are created again after the API server could not."""


class Creator:
    def __init__(self, cluster: Cluster, view: ClusterView, scheduler: Scheduler, credentials: ClusterCredentials) -> None:
        self._cluster = cluster
        self._view = view
        self._scheduler = scheduler
        self._secrets = TokenSecrets(cluster, credentials)
        self._retry_at: dict[GenerationKey, float] = {}
        self._creations = 0

    def begin_pass(self) -> None:
        self._creations = 0

    @property
    def is_exhausted(self) -> bool:
        """Whether this pass may create nothing more."""
        return self._creations >= MAX_CREATIONS

    def create(self, document: Job, snapshot: Snapshot, decided: JobState) -> JobState:
        """Create what a job lacks, once no pod of an earlier attempt is left. Returns its state, with what prevents it."""
        job, key = snapshot.job, snapshot.job.generation_key
        if snapshot.gang is None and snapshot.pods:
            waits = f"waits for {pluralize(len(snapshot.pods), 'pod')} of the attempt before to end"
            return replace(decided, detail="; ".join(filter(None, (decided.detail, waits))))
        if time.monotonic() < self._retry_at.get(key, 0.0):
            return replace(decided, detail=job.detail)
        if self.is_exhausted:
            return decided
        try:
            used_seconds = used_ms(snapshot) / 1000
            created = create_objects(
                self._cluster,
                document,
                self._scheduler,
                job.generation,
                used_seconds,
                lambda item: self._secrets.create(key, item, document),
            )
        except (BadConfiguration, InvalidObject) as problem:
            return replace(decided, phase=Phase.FAILED, detail=str(problem), reason=ExitReason.BAD_CONFIGURATION)
        except ClusterError as problem:
            # Of this job alone: a quota or a webhook that refuses one must not hold up those behind it.
            self._retry_at[key] = time.monotonic() + RETRY_SECONDS
            return replace(decided, detail=f"its objects cannot be created, will retry: {problem}")
        self._creations += 1
        for item in created:
            self._view.add(item)
        log.info("%s %s: created generation %d in %s", job.program, job.job_id, job.generation, job.namespace)
        return decided

    def forget(self, active: Collection[GenerationKey]) -> None:
        """Drop what is cached of all other jobs."""
        for key in self._retry_at.keys() - active:
            del self._retry_at[key]
        self._secrets.forget(active)
