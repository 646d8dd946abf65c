"""Garbage collection of objects of ended generations and of pods on lost nodes."""

import logging
from collections.abc import Callable, Sequence
from functools import partial

from pydantic import ValidationError

from recipes.contracts.job import Program
from recipes.contracts.quantities import parse_duration
from resources.compute.base import JobRef
from resources.compute.credentials import Credentials
from resources.compute.kubernetes.cluster import POD, Cluster, ClusterError, Item
from resources.compute.kubernetes.controller.requests import Requests
from resources.compute.kubernetes.gang import JOB_ID_ANNOTATION, PROGRAM_LABEL
from resources.compute.kubernetes.retention import is_kept
from resources.compute.kubernetes.states import PodState, job_name, read_generation
from resources.compute.kubernetes.submission import delete_gang, delete_rest, place
from resources.compute.kubernetes.view import ClusterState
from resources.metadata.cluster_jobs import ClusterJob, ClusterJobs
from resources.metadata.outbox import now_ms
from resources.settings.scheduler import Scheduler

log = logging.getLogger(__name__)


MAX_DELETIONS = 64
"""Generations deleted in one pass, so that hundreds of ended jobs do not delay the phases of others."""


class GarbageCollector:
    def __init__(
        self, cluster: Cluster, scheduler: Scheduler, jobs: ClusterJobs, credentials: Credentials, requests: Requests
    ) -> None:
        self._cluster = cluster
        self._scheduler = scheduler
        self._jobs = jobs
        self._credentials = credentials
        self._requests = requests
        self._keep_ms = round(parse_duration(scheduler.keep_failed_for) * 1000)
        self._foreign: set[str] = set()
        self._revoked: set[str] = set()

    def collect(self, state: ClusterState, jobs: Sequence[ClusterJob]) -> None:
        """Take the next step of every deletion; `jobs` are those that have not ended."""
        self._delete_old_generations(state, jobs)
        self._remove_lost_pods(state)

    def _delete_old_generations(self, state: ClusterState, jobs: Sequence[ClusterJob]) -> None:
        active = {(job.namespace, job.name): job for job in jobs}
        deletions: list[Callable[[], None]] = []
        for config_map in state.config_maps.values():
            uid, namespace = config_map["metadata"]["uid"], config_map["metadata"]["namespace"]
            if uid in self._foreign:
                continue
            try:
                job = active.get((namespace, job_name(config_map))) or self._find_job(config_map)
                generation = read_generation(config_map)
            except (KeyError, ValueError):  # it has our label, but was not created by us
                job = None
            if job is None:  # applied manually: it has no row and is kept
                self._foreign.add(uid)
                continue
            if generation < job.generation or job.has_ended:
                try:
                    deletions += self._plan_deletion(state, config_map, job)
                except ValidationError as problem:
                    log.warning("deleting %s: %s", config_map["metadata"]["name"], problem)
            if len(deletions) >= MAX_DELETIONS:
                break
        self._carry_out(deletions)

    def _find_job(self, config_map: Item) -> ClusterJob | None:
        metadata = config_map["metadata"]
        ref = JobRef(metadata["annotations"][JOB_ID_ANNOTATION], Program(metadata["labels"][PROGRAM_LABEL]))
        return self._jobs.find(ref)

    def _plan_deletion(self, state: ClusterState, config_map: Item, job: ClusterJob) -> list[Callable[[], None]]:
        """Plan the next step of a deletion: the gang, then the rest without pods."""
        key, generation = place(config_map), read_generation(config_map)
        gang = state.gangs.get(key)
        if is_kept(config_map, job, gang, now_ms(), self._keep_ms):
            self._revoke_kept(config_map, job)
            return []
        if gang is not None:
            return [] if gang.deleting else [partial(delete_gang, self._cluster, gang, self._scheduler)]
        if any(pod.generation == generation for pod in state.pods.get((key[0], job.name), ())):
            return []
        if generation == job.generation:
            # Revoke only now: its pods needed the token to save a checkpoint.
            self._credentials.revoke(self._jobs.document(job))
        log.info("%s %s: deletes what is left of generation %d", job.program, job.job_id, generation)
        return [partial(delete_rest, self._cluster, config_map, self._scheduler)]

    def _revoke_kept(self, config_map: Item, job: ClusterJob) -> None:
        """Revoke the token of a kept job, whose pods have ended."""
        uid = config_map["metadata"]["uid"]
        if uid not in self._revoked:
            self._credentials.revoke(self._jobs.document(job))
            self._revoked.add(uid)

    def _remove_lost_pods(self, state: ClusterState) -> None:
        """Delete pods of lost nodes, which block their gangs in `Terminating` otherwise."""
        lost = [pod for pods in state.pods.values() for pod in pods if pod.deleting and state.is_lost(pod)]
        for pod in lost:
            log.info("removes pod %s: node %s is lost", pod.name, pod.node)
        self._carry_out([partial(self._remove_lost_pod, pod) for pod in lost])

    def _remove_lost_pod(self, pod: PodState) -> None:
        self._cluster.fail_pod(pod.namespace, pod.name, pod.uid)
        self._cluster.delete(POD, pod.namespace, pod.name, uid=pod.uid, grace_seconds=0)

    def _carry_out(self, deletions: Sequence[Callable[[], None]]) -> None:
        for result in self._requests.run(deletions):
            if isinstance(result, ClusterError):  # the next pass tries again
                log.warning("deleting: %s", result)
