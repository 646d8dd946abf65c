"""Create the objects of jobs: after earlier pods are gone, limited per pass, with retries."""

import logging
import shlex
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

from recipes.contracts.exit_reason import ExitReason
from recipes.contracts.job import BadConfiguration, Job
from recipes.contracts.quantities import pluralize
from resources.compute.base import Phase
from resources.compute.kubernetes.cluster import (
    Cluster,
    ClusterError,
    InvalidObject,
    Item,
    QuotaExceeded,
    RequestDenied,
)
from resources.compute.kubernetes.controller.requests import Requests
from resources.compute.kubernetes.controller.token_secrets import TokenSecrets
from resources.compute.kubernetes.job_manifest import render
from resources.compute.kubernetes.phases import Snapshot, used_ms
from resources.compute.kubernetes.submission import Created, create_objects
from resources.compute.kubernetes.view import ClusterView
from resources.jobs.program_tokens import ClusterCredentials
from resources.metadata.cluster_jobs import ClusterJob, GenerationKey, JobState
from resources.metadata.ownership import job_organization
from resources.settings.scheduler import Scheduler

log = logging.getLogger(__name__)

MAX_CREATIONS = 32
"""Jobs whose objects are created in one pass, so that hundreds of submissions do not delay the phases of other jobs."""
RETRY_SECONDS = 5.0
"""Pause before a failed creation is retried."""


@dataclass(frozen=True)
class Creation:
    """Planned creation for one job: rendered objects, token, and the state if it succeeds."""

    job: ClusterJob
    document: Job
    items: Sequence[Item]
    token: str
    state: JobState


class Creator:
    def __init__(
        self, cluster: Cluster, view: ClusterView, scheduler: Scheduler, credentials: ClusterCredentials, requests: Requests
    ) -> None:
        self._cluster = cluster
        self._view = view
        self._scheduler = scheduler
        self._database = credentials.database
        self._tokens = TokenSecrets(credentials)
        self._requests = requests
        self._retry_at: dict[GenerationKey, float] = {}
        self._planned: list[Creation] = []

    def begin_pass(self) -> None:
        self._planned = []

    @property
    def is_exhausted(self) -> bool:
        """Whether this pass has reached its limit of creations."""
        return len(self._planned) >= MAX_CREATIONS

    def plan(self, document: Job, snapshot: Snapshot, decided: JobState) -> JobState | None:
        """Plan to create a job's missing objects once earlier pods are gone.

        Return the job's state if something prevents that; otherwise `create_planned` returns it.
        """
        job, key = snapshot.job, snapshot.job.generation_key
        if snapshot.gang is None and snapshot.pods:
            waits = f"waits for {pluralize(len(snapshot.pods), 'pod')} of the previous attempt to end"
            return replace(decided, detail="; ".join(filter(None, (decided.detail, waits))))
        if time.monotonic() < self._retry_at.get(key, 0.0):
            return replace(decided, detail=job.detail)
        if self.is_exhausted:
            return decided
        try:
            items = render(document, self._scheduler, job.generation, used_ms(snapshot) / 1000, job.namespace)
        except BadConfiguration as problem:
            return refuse(decided, problem)
        self._planned.append(Creation(job, document, items, self._tokens.issue(key, document), decided))
        return None

    def create_planned(self) -> list[tuple[ClusterJob, JobState]]:
        """Create the objects of all planned jobs and return their states."""
        planned, self._planned = self._planned, []
        calls = [partial(create_objects, self._cluster, creation.items, creation.token) for creation in planned]
        results = self._requests.run(calls)
        return [(creation.job, self._note(creation, result)) for creation, result in zip(planned, results, strict=True)]

    def forget(self, active: Collection[GenerationKey]) -> None:
        """Drop what is cached of all other jobs."""
        for key in self._retry_at.keys() - active:
            del self._retry_at[key]
        self._tokens.forget(active)

    def _note(self, creation: Creation, result: Created | ClusterError) -> JobState:
        job, key = creation.job, creation.job.generation_key
        if isinstance(result, InvalidObject):
            self._tokens.settle(key, is_used=False)
            return refuse(creation.state, result)
        if isinstance(result, ClusterError):
            # Delay only this job: a quota or webhook that rejects one must not block the others.
            self._tokens.keep(key)
            self._retry_at[key] = time.monotonic() + RETRY_SECONDS
            return replace(creation.state, detail=self._explain(creation, result))
        self._tokens.settle(key, is_used=not result.secret_existed)
        for item in result.items:
            self._view.add(item)
        log.info("%s %s: created generation %d in %s", job.program, job.job_id, job.generation, job.namespace)
        return creation.state

    def _explain(self, creation: Creation, problem: ClusterError) -> str:
        """Explain why a job waits for its objects, and how to change that."""
        namespace = creation.job.namespace
        words = f"its objects cannot be created, will retry: {problem}"
        if isinstance(problem, QuotaExceeded):
            return f"namespace {namespace} is full, starts when other jobs of the organization have ended: {problem}"
        if not isinstance(problem, RequestDenied) or namespace == self._scheduler.namespace:
            return words
        organization = job_organization(self._database, creation.document)
        command = shlex.join(["hanzo-ml", "tenant", "apply", organization])
        return f"namespace {namespace} is not prepared: an administrator of the cluster runs `{command}`; {words}"


def refuse(decided: JobState, problem: Exception) -> JobState:
    """Return the state of a job whose objects cannot be rendered or are invalid."""
    return replace(decided, phase=Phase.FAILED, detail=str(problem), reason=ExitReason.BAD_CONFIGURATION)
