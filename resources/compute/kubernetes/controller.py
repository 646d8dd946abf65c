"""Controller of jobs on a cluster: `python -m resources.compute.kubernetes.controller`.

The only writer of a job's objects and of its phase. It compares, once a second and after each change, what the rows want
with what the cluster has, and takes the next step. What it knows is in the API server and the database alone: it may be
killed between any two calls. One of several leads (`leader`).
"""

import logging
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import FrameType

from pydantic import ValidationError
from sqlalchemy.exc import SQLAlchemyError

from recipes.contracts.exit_reason import ExitReason
from recipes.contracts.job import EXIT_BAD_CONFIGURATION, BadConfiguration, Program
from recipes.contracts.quantities import pluralize
from resources.compute.base import CREDENTIALS_RENEWAL_SECONDS, JobRef, Phase
from resources.compute.credentials import Credentials
from resources.compute.kubernetes.cluster import (
    EVENT,
    POD,
    Cluster,
    ClusterError,
    InvalidObject,
    Item,
    open_cluster,
)
from resources.compute.kubernetes.endings import Ending, find_endings
from resources.compute.kubernetes.gang import JOB_ID_ANNOTATION, PROGRAM_LABEL, object_name
from resources.compute.kubernetes.generations import is_stuck, next_generation
from resources.compute.kubernetes.leader import LeadershipLost, lead
from resources.compute.kubernetes.phases import (
    Limits,
    Snapshot,
    decide_state,
    find_end,
    find_hold,
    needs_recreation,
    used_ms,
)
from resources.compute.kubernetes.states import GangState, ObjectEvent, PodState, job_name, read_event, read_generation
from resources.compute.kubernetes.submission import create_objects, delete_gang, delete_rest, place
from resources.compute.kubernetes.view import ClusterState, ClusterView
from resources.errors import HanzoError
from resources.jobs.program_tokens import ClusterCredentials
from resources.metadata.cluster_jobs import CANCEL, ClusterJob, ClusterJobs, JobState
from resources.metadata.database import Database
from resources.metadata.job_attempts import Attempt, Claim, JobAttempts
from resources.metadata.outbox import now_ms
from resources.settings.sections import Scheduler
from resources.settings.settings import Settings

log = logging.getLogger(__name__)

INTERVAL_SECONDS = 1.0
MIN_INTERVAL_SECONDS = 0.1
"""Between two passes: changes that come together are one."""
MAX_CREATIONS = 10
"""Jobs whose objects are created in one pass: the others' phases do not wait for hundreds that were submitted at once."""
RETRY_SECONDS = 5.0
"""Pause before objects are created again after the API server could not."""
EVENTS_SECONDS = 3.0
"""Between two requests for the events of a job whose pods do not start."""
MAX_HELD_PODS = 3
"""Of a job, whose events are read."""

Key = tuple[str, Program, int]


@dataclass(frozen=True)
class SeenEvents:
    at: float
    events: Sequence[ObjectEvent]


class Controller:
    """One leader's work. `reconcile` is one pass; everything kept between passes is a cache."""

    def __init__(
        self, cluster: Cluster, view: ClusterView, scheduler: Scheduler, database: Database, credentials: Credentials
    ) -> None:
        self._cluster = cluster
        self._view = view
        self._scheduler = scheduler
        self._jobs = ClusterJobs(database)
        self._attempts = JobAttempts(database)
        self._credentials = credentials
        self._limits: dict[Key, Limits] = {}
        self._events: dict[Key, SeenEvents] = {}
        self._create_after: dict[Key, float] = {}
        self._creations = 0
        self._renewed_at: float | None = None
        self._foreign: set[str] = set()

    def reconcile(self) -> bool:
        """One pass over all jobs. Returns whether another should follow at once.

        Raises:
            SQLAlchemyError, LeadershipLost: of the database; the next pass does what is left.
        """
        state = self._view.read()  # before the rows: what a pod reported before it ended is then among them
        jobs = self._jobs.active()
        attempts = self._attempts.list_active()
        again, self._creations = False, 0
        for job in jobs:
            try:
                again |= self._reconcile_job(job, state, attempts.get((job.job_id, job.program), ()))
            except ClusterError as problem:
                log.warning("%s %s: %s", job.program, job.job_id, problem)
            except (SQLAlchemyError, LeadershipLost):
                raise
            except Exception:  # what this release cannot read of one job must not stop the others
                log.exception("%s %s cannot be reconciled", job.program, job.job_id)
        self._clean_up(state, jobs)
        self._remove_lost_pods(state)
        self._renew_credentials(jobs)
        self._forget(jobs)
        return again or self._creations >= MAX_CREATIONS

    def _reconcile_job(self, job: ClusterJob, state: ClusterState, attempts: Sequence[Attempt]) -> bool:
        snapshot = self._take_snapshot(job, state, attempts)
        recorded = [self._record(job, ending, snapshot.limits.nodes) for ending in find_endings(snapshot)]
        if any(recorded):
            return True  # decided from what is written then
        if self._begin_generation(snapshot):
            return True
        decided = decide_state(snapshot)
        end, gang = find_end(snapshot), snapshot.gang
        if end is not None:
            if end.waits_for_pods and end.is_lasting and gang is not None and not gang.deleting:
                self._delete_gang(gang)
        elif gang is not None and needs_recreation(snapshot):
            self._delete_gang(gang)
        elif gang is None or object_place(job) not in state.config_maps:
            decided = self._create(job, snapshot, decided)
        self._write(job, decided)
        return False

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
            workload=workload,
            queue_position=state.queue_positions.get(workload.uid) if workload else None,
            pods=pods,
            deleted_pods=state.deleted_pods.get((job.namespace, job.name), ()),
            lost_nodes=frozenset(pod.node for pod in pods if state.is_lost(pod)),
        )
        return replace(snapshot, events=self._read_events(snapshot))

    def _find_limits(self, job: ClusterJob) -> Limits:
        key = cache_key(job)
        if key not in self._limits:
            self._limits[key] = Limits.from_job(self._jobs.document(job), self._scheduler)
        return self._limits[key]

    def _read_events(self, snapshot: Snapshot) -> Sequence[ObjectEvent]:
        """Events about what does not start, newest last: of a gang that holds its nodes only."""
        gang, key = snapshot.gang, cache_key(snapshot.job)
        if gang is None or find_hold(snapshot) is None:
            self._events.pop(key, None)
            return ()
        seen = self._events.get(key)
        if seen is not None and time.monotonic() - seen.at < EVENTS_SECONDS:
            return seen.events
        held = [pod for pod in snapshot.current_pods if not pod.running and not pod.has_ended]
        names = [pod.name for pod in held[:MAX_HELD_PODS]]
        if len(snapshot.current_pods) < snapshot.limits.nodes:
            names += [gang.name, f"{gang.name}-node-0"]  # the JobSet, or the Job, and the JobSet's child
        found = [event for name in names for event in self._list_events(gang.namespace, name)]
        since = max((pod.scheduled_at for pod in held), default=0)
        since = max(since, (snapshot.newest and snapshot.newest.ended_at) or 0) - 1000
        current = sorted((one for one in found if one.last_seen >= since), key=lambda one: one.last_seen)
        self._events[key] = SeenEvents(time.monotonic(), current)
        return current

    def _list_events(self, namespace: str, name: str) -> list[ObjectEvent]:
        try:
            items, _ = self._cluster.list(EVENT, namespace, fieldSelector=f"involvedObject.name={name}")
        except ClusterError as problem:  # they only explain: the rest of the pass goes on
            log.warning("events of %s cannot be read: %s", name, problem)
            return []
        return [read_event(item) for item in items]

    def _record(self, job: ClusterJob, ending: Ending, nodes: int) -> bool:
        """Write how an attempt ended. Returns whether it was recorded."""
        number = ending.attempt
        try:
            if number is None:
                number = self._claim(job, ending.unclaimed, nodes)
            self._attempts.end(job, number, ending.reason, ending.message, ended_at=ending.at)
        except HanzoError as problem:  # the job was cancelled, or submitted again, a moment ago
            log.info("%s %s: %s", job.program, job.job_id, problem)
            return False
        log.info("%s %s attempt %d: %s, %s", job.program, job.job_id, number, ending.reason, ending.message)
        return True

    def _claim(self, job: ClusterJob, pod: PodState | None, nodes: int) -> int:
        assert pod is not None  # an ending without a number has the pod that did not claim one
        claim = Claim(generation=pod.generation, pod_uid=pod.uid, node_rank=0, num_nodes=nodes, node=pod.node)
        return self._attempts.claim(job, claim).attempt

    def _begin_generation(self, snapshot: Snapshot) -> bool:
        """Have a job that waits in vain go on as another generation."""
        job = snapshot.job
        if job.wanted == CANCEL or not (snapshot.limits.elastic or is_stuck(snapshot)):
            return False
        document = next_generation(snapshot, self._jobs.document(job))
        if document is None or not self._jobs.restart(document, job.generation):
            return False
        nodes = pluralize(Limits.from_job(document, self._scheduler).nodes, "node")
        log.info("%s %s: goes on as generation %d with %s", job.program, job.job_id, job.generation + 1, nodes)
        return True

    def _create(self, job: ClusterJob, snapshot: Snapshot, decided: JobState) -> JobState:
        """Create what the job lacks, once no pod of an earlier attempt is left. Returns its state, with what prevents it."""
        if snapshot.gang is None and snapshot.pods:
            waits = f"waits for {pluralize(len(snapshot.pods), 'pod')} of the attempt before to end"
            return replace(decided, detail=waits)
        if time.monotonic() < self._create_after.get(cache_key(job), 0.0):
            return replace(decided, detail=job.detail)
        if self._creations >= MAX_CREATIONS:
            return decided
        try:
            document = self._jobs.document(job)
            used_seconds = used_ms(snapshot) / 1000
            created = create_objects(
                self._cluster, document, self._scheduler, job.generation, used_seconds, self._credentials
            )
        except (BadConfiguration, InvalidObject) as problem:
            return replace(decided, phase=Phase.FAILED, detail=str(problem), reason=ExitReason.BAD_CONFIGURATION)
        except ClusterError as problem:
            # Of this job alone: a quota or a webhook that refuses one must not hold up those behind it.
            self._create_after[cache_key(job)] = time.monotonic() + RETRY_SECONDS
            return replace(decided, detail=f"its objects cannot be created, will retry: {problem}")
        self._creations += 1
        for item in created:
            self._view.add(item)
        log.info("%s %s: created generation %d in %s", job.program, job.job_id, job.generation, job.namespace)
        return decided

    def _write(self, job: ClusterJob, state: JobState) -> None:
        before = JobState(job.phase, job.detail, job.reason, job.attempt, job.queue_position, job.admitted_at)
        if state == before:
            return
        self._jobs.set_state(job, state)
        if state.phase is not job.phase:
            log.info("%s %s: %s %s", job.program, job.job_id, state.phase, state.detail)

    def _delete_gang(self, gang: GangState) -> None:
        delete_gang(self._cluster, (gang.namespace, gang.name), self._scheduler)

    def _clean_up(self, state: ClusterState, jobs: Sequence[ClusterJob]) -> None:
        """Delete the objects of generations that are over."""
        active = {(job.namespace, job.name): job for job in jobs}
        for config_map in state.config_maps.values():
            uid, namespace = config_map["metadata"]["uid"], config_map["metadata"]["namespace"]
            if uid in self._foreign:
                continue
            try:
                job = active.get((namespace, job_name(config_map))) or self._find_job(config_map)
                generation = read_generation(config_map)
            except (KeyError, ValueError):  # it has our label, and is nothing that we made
                job = None
            if job is None:  # applied by hand: it has no row, and stays
                self._foreign.add(uid)
                continue
            if generation < job.generation or job.has_ended:
                try:
                    self._delete(state, config_map, job)
                except (ClusterError, ValidationError) as problem:
                    log.warning("deleting %s: %s", config_map["metadata"]["name"], problem)

    def _find_job(self, config_map: Item) -> ClusterJob | None:
        metadata = config_map["metadata"]
        ref = JobRef(metadata["annotations"][JOB_ID_ANNOTATION], Program(metadata["labels"][PROGRAM_LABEL]))
        return self._jobs.find(ref)

    def _delete(self, state: ClusterState, config_map: Item, job: ClusterJob) -> None:
        """The next step of deleting a generation: its gang, and what is left once its pods are gone."""
        key, generation = place(config_map), read_generation(config_map)
        if key in state.gangs:
            if not state.gangs[key].deleting:
                delete_gang(self._cluster, key, self._scheduler)
            return
        if any(pod.generation == generation for pod in state.pods.get((job.namespace, job.name), ())):
            return
        if generation == job.generation:
            # Only now: its pods saved a checkpoint until they were gone.
            self._credentials.revoke(self._jobs.document(job))
        delete_rest(self._cluster, config_map, self._scheduler)
        log.info("%s %s: deleted generation %d", job.program, job.job_id, generation)

    def _remove_lost_pods(self, state: ClusterState) -> None:
        """Pods of nodes that are gone stay `Terminating` for ever otherwise, and their gangs with them."""
        for pods in state.pods.values():
            for pod in pods:
                if pod.deleting and state.is_lost(pod):
                    try:
                        self._cluster.delete(POD, pod.namespace, pod.name, grace_seconds=0)
                        log.info("removed pod %s: node %s is lost", pod.name, pod.node)
                    except ClusterError as problem:
                        log.warning("removing pod %s: %s", pod.name, problem)

    def _renew_credentials(self, jobs: Sequence[ClusterJob]) -> None:
        """Keep tokens valid however long a job waits."""
        now = time.monotonic()
        if self._renewed_at is not None and now - self._renewed_at < CREDENTIALS_RENEWAL_SECONDS:
            return
        for job in jobs:
            if job.wanted != CANCEL:
                with suppress(ValidationError):  # the pass over the jobs has logged it
                    self._credentials.renew(self._jobs.document(job))
        self._renewed_at = now

    def _forget(self, jobs: Sequence[ClusterJob]) -> None:
        """Drop what is cached of jobs that have ended."""
        active = {cache_key(job) for job in jobs}
        cached: Mapping[Key, object]
        for cached in (self._limits, self._events, self._create_after):
            for key in cached.keys() - active:
                del cached[key]


def cache_key(job: ClusterJob) -> Key:
    return job.job_id, job.program, job.generation


def object_place(job: ClusterJob) -> tuple[str, str]:
    """Namespace and name of the objects of its newest generation."""
    return job.namespace, object_name(job, job.generation)


def control(
    settings: Settings, view: ClusterView, cluster: Cluster, changed: threading.Event, stopped: threading.Event
) -> None:
    """Lead until leadership is lost or `stopped` is set."""
    connect_seconds = settings.database.connect_seconds
    lock_file = settings.home / "controller.lock"
    with lead(settings.database_url, connect_seconds, lock_file, stopped) as database:
        log.info("leading")
        controller = Controller(cluster, view, settings.scheduler, database, ClusterCredentials(database))
        while not stopped.is_set():
            changed.clear()
            try:
                # From copies that are not current, running attempts would look as if their pods were gone.
                again = controller.reconcile() if view.is_current else False
            except SQLAlchemyError as problem:
                log.warning("the database does not answer, will retry: %s", problem)
                again = False
            stopped.wait(MIN_INTERVAL_SECONDS)
            if not again:
                changed.wait(INTERVAL_SECONDS - MIN_INTERVAL_SECONDS)


def run(settings: Settings, stopped: threading.Event) -> None:
    """Until it is stopped. Whatever fails is tried again."""
    changed = threading.Event()
    cluster = open_cluster(settings.scheduler.kubeconfig)
    view = ClusterView(cluster, settings.scheduler.gang_backend, changed.set)
    view.start()
    while not stopped.is_set():
        try:
            control(settings, view, cluster, changed, stopped)
        except LeadershipLost as problem:
            log.warning("leadership lost: %s", problem)


def main() -> int:
    stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.set()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        run(Settings.load(), stopped)
    except (BadConfiguration, ClusterError) as problem:
        print(f"hanzo-ml: {problem}", file=sys.stderr)
        return EXIT_BAD_CONFIGURATION
    return 0


if __name__ == "__main__":
    sys.exit(main())
