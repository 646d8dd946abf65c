"""Reconcile all jobs: compare rows with the cluster's state and take the next step."""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

from pydantic import ValidationError
from sqlalchemy.exc import SQLAlchemyError

from recipes.contracts.quantities import pluralize
from resources.compute.base import CREDENTIALS_RENEWAL_SECONDS
from resources.compute.kubernetes.cluster import Cluster, ClusterError
from resources.compute.kubernetes.controller.creation import Creator
from resources.compute.kubernetes.controller.event_reader import EventReader
from resources.compute.kubernetes.controller.garbage_collection import GarbageCollector
from resources.compute.kubernetes.controller.leader import LeadershipLost, RowLocked
from resources.compute.kubernetes.controller.priority_classes import PriorityClasses
from resources.compute.kubernetes.controller.requests import Requests
from resources.compute.kubernetes.endings import Ending, find_endings
from resources.compute.kubernetes.gang import object_name
from resources.compute.kubernetes.generations import is_stuck, next_generation
from resources.compute.kubernetes.phases import Limits, Snapshot, decide_state, find_end, needs_recreation
from resources.compute.kubernetes.states import GangState, PodState
from resources.compute.kubernetes.submission import delete_gang
from resources.compute.kubernetes.view import ClusterState, ClusterView
from resources.errors import HanzoError
from resources.jobs.program_tokens import ClusterCredentials
from resources.metadata.cluster_jobs import CANCEL, ClusterJob, ClusterJobs, GenerationKey, JobState
from resources.metadata.database import Database
from resources.metadata.gpu_usage import EXTEND_SECONDS
from resources.metadata.job_attempts import Attempt, Claim, JobAttempts
from resources.metadata.outbox import now_ms
from resources.settings.scheduler import Scheduler

log = logging.getLogger(__name__)


class Reconciler:
    """Reconciler of a leader; everything kept between passes is a cache."""

    def __init__(
        self, cluster: Cluster, view: ClusterView, scheduler: Scheduler, database: Database, credentials: ClusterCredentials
    ) -> None:
        self._cluster = cluster
        self._view = view
        self._scheduler = scheduler
        self._jobs = ClusterJobs(database)
        self._attempts = JobAttempts(database)
        self._credentials = credentials
        self._requests = Requests()
        self._events = EventReader(cluster, self._requests)
        self._priority_classes = PriorityClasses(cluster)
        self._creator = Creator(cluster, view, scheduler, credentials, self._requests)
        self._garbage_collector = GarbageCollector(cluster, scheduler, self._jobs, credentials, self._requests)
        self._gangs_to_delete: list[GangState] = []
        self._limits: dict[GenerationKey, Limits] = {}
        self._renewed_at: float | None = None
        self._metered_at: float | None = None

    def reconcile(self) -> bool:
        """Run one pass over all jobs; return whether another should follow at once.

        Raises:
            SQLAlchemyError, LeadershipLost, RowLocked: from the database; the next pass does the rest.
        """
        state = self._view.read()  # before the rows, so that they include what an ended pod has reported
        jobs = self._jobs.active()
        attempts = self._attempts.list_active()
        self._gangs_to_delete = []  # clear the decisions of a pass that failed
        self._creator.begin_pass()
        again = False
        for snapshot in self._events.add_events(self._take_snapshots(state, jobs, attempts)):
            with self._log_problems(snapshot.job):
                again |= self._reconcile_job(snapshot, state)
        again |= self._creator.is_exhausted
        self._carry_out()
        self._garbage_collector.collect(state, jobs)
        self._renew_credentials(jobs)
        self._meter_gpus()
        self._forget(jobs)
        return again

    @contextmanager
    def _log_problems(self, job: ClusterJob) -> Iterator[None]:
        """Log errors of one job, which must not stop the others; re-raise database errors."""
        try:
            yield
        except (ClusterError, RowLocked) as problem:
            log.warning("%s %s: %s", job.program, job.job_id, problem)
        except (SQLAlchemyError, LeadershipLost):
            raise
        except Exception:  # such as a document that this release cannot read
            log.exception("%s %s cannot be reconciled", job.program, job.job_id)

    def _reconcile_job(self, snapshot: Snapshot, state: ClusterState) -> bool:
        job = snapshot.job
        recorded = [self._record(job, ending, snapshot.limits.nodes) for ending in find_endings(snapshot)]
        if any(recorded):
            return True  # the next pass decides from the written rows
        if self._begin_generation(snapshot):
            return True
        decided = decide_state(snapshot)
        end, gang = find_end(snapshot), snapshot.gang
        is_planned = False
        if end is not None:
            if end.waits_for_pods and end.is_lasting and gang is not None and not gang.deleting:
                self._gangs_to_delete.append(gang)
        elif gang is not None and needs_recreation(snapshot):
            self._gangs_to_delete.append(gang)
        elif gang is None or object_place(job) not in state.config_maps:
            planned = self._creator.plan(self._jobs.document(job), snapshot, decided)
            decided, is_planned = planned or decided, planned is None
        if not is_planned:
            self._write(job, decided)
        return False

    def _carry_out(self) -> None:
        """Send the decided requests, several concurrently."""
        gangs = self._gangs_to_delete
        calls = [partial(delete_gang, self._cluster, gang, self._scheduler) for gang in gangs]
        for gang, result in zip(gangs, self._requests.run(calls), strict=True):
            if isinstance(result, ClusterError):  # the next pass retries
                log.warning("deleting %s: %s", gang.name, result)
        for job, state in self._creator.create_planned():
            with self._log_problems(job):
                self._write(job, state)

    def _take_snapshots(
        self, state: ClusterState, jobs: Sequence[ClusterJob], attempts: Mapping[tuple[str, str], Sequence[Attempt]]
    ) -> list[Snapshot]:
        snapshots = []
        for job in jobs:
            with self._log_problems(job):
                snapshots.append(self._take_snapshot(job, state, attempts.get((job.job_id, job.program), ())))
        return snapshots

    def _take_snapshot(self, job: ClusterJob, state: ClusterState, attempts: Sequence[Attempt]) -> Snapshot:
        gang = state.gangs.get(object_place(job))
        workload = state.workloads.get(gang.uid) if gang else None
        pods = state.pods.get((job.namespace, job.name), ())
        snapshot = Snapshot(
            job=job,
            limits=self._find_limits(job),
            now=now_ms(),
            attempts=[attempt for attempt in attempts if attempt.started_at >= job.created_at],
            gang=gang,
            deleted_gang=state.deleted_gangs.get(object_place(job)),
            workload=workload,
            queue_position=state.queue_positions.get(workload.uid) if workload else None,
            queue_words=state.queue_words.get(workload.queue, "") if workload else "",
            pods=pods,
            deleted_pods=state.deleted_pods.get((job.namespace, job.name), ()),
            lost_nodes=frozenset(pod.node for pod in pods if state.is_lost(pod)),
        )
        return replace(snapshot, queue_problem=self._priority_classes.explain(snapshot))

    def _find_limits(self, job: ClusterJob) -> Limits:
        key = job.generation_key
        if key not in self._limits:
            self._limits[key] = Limits.from_job(self._jobs.document(job), self._scheduler)
        return self._limits[key]

    def _record(self, job: ClusterJob, ending: Ending, nodes: int) -> bool:
        """Write how an attempt ended; return whether it was recorded."""
        number = ending.attempt
        try:
            if number is None:
                number = self._claim(job, ending.unclaimed, nodes)
            self._attempts.end(job, number, ending.reason, ending.message, ended_at=ending.at)
        except HanzoError as problem:  # the job has just been cancelled or resubmitted
            log.info("%s %s: %s", job.program, job.job_id, problem)
            return False
        log.info("%s %s attempt %d: %s, %s", job.program, job.job_id, number, ending.reason, ending.message)
        return True

    def _claim(self, job: ClusterJob, pod: PodState | None, nodes: int) -> int:
        assert pod is not None  # an ending without a number has the pod that did not claim one
        claim = Claim(generation=pod.generation, pod_uid=pod.uid, node_rank=0, num_nodes=nodes, node=pod.node)
        return self._attempts.claim(job, claim).attempt

    def _begin_generation(self, snapshot: Snapshot) -> bool:
        """Recreate a job that waits in vain as a new generation."""
        job = snapshot.job
        if job.wanted == CANCEL or not (snapshot.limits.elastic or is_stuck(snapshot)):
            return False
        document = next_generation(snapshot, self._jobs.document(job))
        if document is None or not self._jobs.restart(document, job.generation):
            return False
        nodes = pluralize(Limits.from_job(document, self._scheduler).nodes, "node")
        log.info("%s %s: continues as generation %d with %s", job.program, job.job_id, job.generation + 1, nodes)
        return True

    def _write(self, job: ClusterJob, state: JobState) -> None:
        if state == job.state:
            return
        self._jobs.set_state(job, state)
        if state.phase is not job.phase:
            log.info("%s %s: %s %s", job.program, job.job_id, state.phase, state.detail)

    def _renew_credentials(self, jobs: Sequence[ClusterJob]) -> None:
        """Renew tokens, which must stay valid while a job waits."""
        now = time.monotonic()
        if self._renewed_at is not None and now - self._renewed_at < CREDENTIALS_RENEWAL_SECONDS:
            return
        for job in jobs:
            if job.wanted != CANCEL:
                with suppress(ValidationError):  # the pass over the jobs has logged it
                    self._credentials.renew(self._jobs.document(job))
        self._renewed_at = now

    def _meter_gpus(self) -> None:
        now = time.monotonic()
        if self._metered_at is None or now - self._metered_at >= EXTEND_SECONDS:
            self._attempts.meter_gpus()
            self._metered_at = now

    def _forget(self, jobs: Sequence[ClusterJob]) -> None:
        """Drop cached data of ended jobs."""
        active = {job.generation_key for job in jobs}
        for key in self._limits.keys() - active:
            del self._limits[key]
        self._creator.forget(active)


def object_place(job: ClusterJob) -> tuple[str, str]:
    """Return namespace and name of the objects of a job's newest generation."""
    return job.namespace, object_name(job, job.generation)
