"""Phase of a job on a cluster, and why: a pure function of its row, its attempts and the objects of the cluster."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from recipes.contracts.exit_reason import ExitReason
from recipes.contracts.job import Job
from recipes.contracts.quantities import parse_duration, pluralize
from resources.compute.base import Phase
from resources.compute.kubernetes.deletions import describe_deletion, find_deleted_pod
from resources.compute.kubernetes.exits import explain_gang
from resources.compute.kubernetes.retention import describe_kept_pods, is_ending
from resources.compute.kubernetes.states import CONFIG_REASONS, PULL_REASONS, GangState, ObjectEvent, PodState, WorkloadState
from resources.metadata.cluster_jobs import CANCEL, ClusterJob, JobState
from resources.metadata.job_attempts import Attempt
from resources.settings.scheduler import Scheduler

PROGRESS_MS = 3_600_000
"""An attempt that ran for so long made progress, as one did that saved a checkpoint: counting begins again with it."""
DELETED_GANG = "somebody deleted the objects of the job in the cluster"
IDENTIFIERS = re.compile(r" \(UID: [^)]*\)|; preemptor path: .*?(?=$|; [^p])")
"""In Kueue's words for a preemption: of use to its developers alone."""
OTHER_FLAVOR = re.compile(
    r"(insufficient quota for \S+ in flavor [\w.-]*\w, previously considered podsets requests \(\S*\)"
    r" \+ current podset request \(\S*\) > maximum capacity \(0\)"
    r"|untolerated taint \{[^}]*\} in flavor [\w.-]*\w"
    r"|flavor [\w.-]*\w doesn't match node affinity)(, )?"
)
"""In Kueue's words for a Workload that waits: a flavor that has none of the resource, or is for other jobs."""
DEADLINE_EXCEEDED = "DeadlineExceeded"
"""Reason of a Job that failed by its `activeDeadlineSeconds`."""
CREATION_FAILURES = frozenset({"FailedCreate", "JobCreationFailed", "HeadlessServiceCreationFailed"})
"""Reasons of events about a JobSet, or a Job, whose children cannot be created."""
INVALID_CHILD = re.compile(r"is invalid:|Invalid value", re.IGNORECASE)
"""In the event of a child that the API server refuses for its contents: no repetition helps. What a webhook denies may pass
later: Kueue's deny a child whose parent they have not seen yet.
"""


@dataclass(frozen=True)
class Limits:
    """Of a job: its pods, the time that all its attempts may take, and how many of them may fail.

    `start_ms`: how long a pod may wait for its image or its configuration. `elastic`: it accepts fewer nodes. `shares`: its
    pods end one by one. `keeps_failed`: its pods stay for `keep_ms` when it has failed.
    """

    nodes: int
    max_ms: int
    max_duration: str
    retries: int
    start_ms: int
    elastic: bool
    keeps_failed: bool
    keep_ms: int
    shares: bool = False

    @classmethod
    def from_job(cls, job: Job, scheduler: Scheduler) -> Self:
        limit = job.schedule.max_duration
        return cls(
            nodes=job.distributed.num_nodes if job.distributed else job.pods,
            max_ms=round(parse_duration(limit) * 1000),
            max_duration=limit,
            retries=job.schedule.retries,
            start_ms=round(parse_duration(scheduler.start_limit) * 1000),
            elastic=job.distributed is not None and job.distributed.elastic is not None,
            shares=job.distributed is None and job.pods > 1,
            keeps_failed=job.pod.keep_failed,
            keep_ms=round(parse_duration(scheduler.keep_failed_for) * 1000),
        )


@dataclass(frozen=True)
class Snapshot:
    """All that is known of a job at one moment. Times in milliseconds since 1970.

    Args:
        attempts: since it was submitted, oldest first.
        queue_words: what the first in its queue waits for.
        pods: those that exist, of all generations; `deleted_pods` are last states.
        events: about its pods and its gang, oldest first; only of a gang that is starting.
        queue_problem: why Kueue does not see the gang, where that is known.
    """

    job: ClusterJob
    limits: Limits
    now: int
    attempts: Sequence[Attempt] = ()
    gang: GangState | None = None
    deleted_gang: GangState | None = None
    workload: WorkloadState | None = None
    queue_position: int | None = None
    queue_words: str = ""
    pods: Sequence[PodState] = ()
    deleted_pods: Sequence[PodState] = ()
    lost_nodes: frozenset[str] = frozenset()
    events: Sequence[ObjectEvent] = ()
    queue_problem: str = ""

    @property
    def newest(self) -> Attempt | None:
        return self.attempts[-1] if self.attempts else None

    @property
    def last_ended(self) -> Attempt | None:
        return next((found for found in reversed(self.attempts) if found.reason is not None), None)

    @property
    def current_pods(self) -> list[PodState]:
        """Pods of the newest generation that are not being deleted."""
        return [pod for pod in self.pods if pod.generation == self.job.generation and not pod.deleting]

    @property
    def all_pods(self) -> list[PodState]:
        """Pods of the newest generation: those that were deleted, then those that exist."""
        return [pod for pod in (*self.deleted_pods, *self.pods) if pod.generation == self.job.generation]


def used_ms(snapshot: Snapshot) -> int:
    """Time that the job's attempts have taken: waiting takes none."""
    return sum((found.ended_at or snapshot.now) - found.started_at for found in snapshot.attempts)


def count_failures(attempts: Sequence[Attempt]) -> int:
    """Attempts that count against the limit of restarts: from the last one on that made progress."""
    count = 0
    for attempt in attempts:
        ran_ms = (attempt.ended_at or attempt.started_at) - attempt.started_at
        if attempt.saved_at is not None or ran_ms > PROGRESS_MS:
            count = 0
        count += attempt.counted
    return count


@dataclass(frozen=True)
class End:
    """That a job is over, or is to end.

    Args:
        waits_for_pods: its pods save a checkpoint first.
        is_lasting: the rows say so. Else the gang does, which must not be deleted before the end is written.
    """

    reason: ExitReason
    detail: str
    waits_for_pods: bool = False
    is_lasting: bool = True


def find_end(snapshot: Snapshot) -> End | None:
    """Why the job is over, or has to end; None if it goes on."""
    job, gang, last = snapshot.job, snapshot.gang, snapshot.last_ended
    if (gang is not None and gang.ended == "succeeded") or is_complete(snapshot):
        return End(ExitReason.COMPLETED, "")
    if last is not None and last is snapshot.newest and is_final(last):
        return End(last.reason or ExitReason.UNKNOWN, last.message)
    if job.wanted == CANCEL:
        return End(ExitReason.CANCELLED, "cancelled", waits_for_pods=True)
    is_time_used = used_ms(snapshot) >= snapshot.limits.max_ms
    if is_time_used or is_time_over(gang, snapshot.workload):
        limit = snapshot.limits.max_duration
        detail = f"it took longer than schedule.max_duration, {limit}: what it saved stays, give it more time"
        return End(ExitReason.TIMED_OUT, detail, waits_for_pods=True, is_lasting=is_time_used)
    failures = count_failures(snapshot.attempts)
    if last is not None and failures > snapshot.limits.retries:
        return End(last.reason or ExitReason.UNKNOWN, f"{last.message} ({pluralize(failures, 'attempt')} failed)")
    if needs_recreation(snapshot):
        return None
    if gang is not None and gang.ended == "failed":
        return explain_failed_gang(snapshot, gang)
    hold = find_hold(snapshot)
    if hold is None or not hold.is_final:
        return None
    # What has started before is configured well: a registry, a volume or a node is away, and the work is tried again later.
    return End(ExitReason.SUPERVISOR_FAILED if snapshot.attempts else ExitReason.BAD_CONFIGURATION, hold.detail)


def is_time_over(gang: GangState | None, workload: WorkloadState | None) -> bool:
    """Whether the cluster has stopped the gang because `max_duration` is used up: its clock runs from the admission."""
    return (workload is not None and workload.timed_out) or (gang is not None and gang.reason == DEADLINE_EXCEEDED)


def needs_recreation(snapshot: Snapshot) -> bool:
    """Whether the gang has failed, does not restart by itself, and another attempt may follow.

    That is so where the reason of its newest attempt restarts, or no attempt began because somebody deleted a pod of it.
    """
    gang, newest = snapshot.gang, snapshot.newest
    if gang is None or gang.ended != "failed" or gang.restarts_itself:
        return False
    if newest is not None and newest.reason is not None and newest.reason.restarts:
        return True
    return find_deleted_pod(gang, snapshot.all_pods) is not None


def is_complete(snapshot: Snapshot) -> bool:
    """Whether all nodes have reported, as one, that the result is stored: the cluster sees it some seconds later.

    Pods that share work report one by one.
    """
    newest = snapshot.newest
    return newest is not None and newest.reason is ExitReason.COMPLETED and not snapshot.limits.shares


def is_final(attempt: Attempt) -> bool:
    """Whether no attempt follows one that ended like this, and failed."""
    return attempt.reason is not None and not attempt.reason.restarts and attempt.reason is not ExitReason.COMPLETED


def explain_failed_gang(snapshot: Snapshot, gang: GangState) -> End:
    """Of a gang that the cluster itself gave up."""
    seen = explain_gang(snapshot.current_pods, snapshot.lost_nodes)
    if seen is not None and seen.reason is not ExitReason.COMPLETED:
        return End(seen.reason, seen.message)
    last = snapshot.last_ended
    return End((last and last.reason) or ExitReason.UNKNOWN, (last and last.message) or gang.message)


@dataclass(frozen=True)
class Hold:
    """What keeps the pods of an admitted gang from starting. `is_final`: waiting longer would not help."""

    detail: str
    is_final: bool = False


def find_hold(snapshot: Snapshot) -> Hold | None:
    """What holds the gang; None where it is suspended, absent, or all of its pods run."""
    gang, pods = snapshot.gang, snapshot.current_pods
    if gang is None or gang.suspended or gang.ended or gang.deleting:
        return None
    held = [found for pod in pods if (found := find_pod_hold(pod, snapshot))]
    if held:
        return next((found for found in held if found.is_final), held[0])
    if len(pods) >= snapshot.limits.nodes:
        return None
    ending = sum(bool(pod.deleting) for pod in snapshot.pods)
    if ending:
        return Hold(f"waits for {pluralize(ending, 'pod')} of the attempt before to end")
    if newest := find_newest(snapshot.events, lambda event: event.reason in CREATION_FAILURES):
        return Hold(f"its pods cannot be created: {newest.message}", bool(INVALID_CHILD.search(newest.message)))
    return Hold("its pods are being created")


def find_newest(events: Sequence[ObjectEvent], matches: Callable[[ObjectEvent], bool]) -> ObjectEvent | None:
    return next((event for event in reversed(events) if matches(event)), None)


def find_pod_hold(pod: PodState, snapshot: Snapshot) -> Hold | None:
    if pod.running or pod.has_ended:
        return None
    if pod.unschedulable:
        return Hold(f"no node for pod {pod.name}: {pod.unschedulable}")
    waited = snapshot.now - pod.scheduled_at if pod.scheduled_at else 0
    is_late = waited > snapshot.limits.start_ms
    if pod.waiting in PULL_REASONS:
        detail = f"image {pod.image} cannot be pulled: {pod.message or pod.waiting}"
        return Hold(detail, is_late or pod.waiting == "InvalidImageName")
    if pod.waiting in CONFIG_REASONS:
        return Hold(f"pod {pod.name} cannot start: {pod.message or pod.waiting}", is_late)
    about_pod = [event for event in snapshot.events if event.about == pod.name and event.reason != "FailedScheduling"]
    # A warning before any other event: "pulling image" is the last that was said before a volume is mounted.
    if warning := find_newest(about_pod, lambda event: event.is_warning):
        return Hold(f"pod {pod.name}: {warning.message}", is_late)
    if pulling := find_newest(about_pod, lambda event: event.reason == "Pulling"):
        return Hold(f"pod {pod.name} on node {pod.node}: {pulling.message}")
    return Hold(f"pod {pod.name} is starting" + (f" on node {pod.node}" if pod.node else ""))


def decide_state(snapshot: Snapshot) -> JobState:
    """How the job stands now."""
    job, end = snapshot.job, find_end(snapshot)
    attempt = max(job.attempt, snapshot.newest.attempt if snapshot.newest else 0)
    admitted_at = find_admission(snapshot)
    if end is not None:
        if end.waits_for_pods and snapshot.pods:
            ending = f"{end.detail}; its pods may still save a checkpoint"
            return JobState(job.phase, ending, job.reason, attempt, None, admitted_at)
        if end.reason is ExitReason.COMPLETED:
            return JobState(Phase.SUCCEEDED, end.detail, end.reason, attempt, None, admitted_at)
        kept = ""
        if snapshot.limits.keeps_failed:
            if is_ending(snapshot.gang, snapshot.newest, snapshot.now):
                return JobState(job.phase, f"{end.detail}; its pods end", job.reason, attempt, None, admitted_at)
            kept = describe_kept_pods(snapshot.gang, snapshot.current_pods, snapshot.now + snapshot.limits.keep_ms)
        detail = "; ".join(filter(None, (end.detail, kept)))
        return JobState(Phase.FAILED, detail, end.reason, attempt, None, admitted_at)
    last = snapshot.last_ended
    phase, detail = find_phase(snapshot)
    waits = phase in (Phase.PENDING, Phase.SUSPENDED)
    return JobState(
        phase=phase,
        detail=detail,
        reason=last.reason if last else None,
        attempt=attempt,
        queue_position=snapshot.queue_position if waits else None,
        admitted_at=admitted_at,
    )


def find_phase(snapshot: Snapshot) -> tuple[Phase, str]:
    """Phase and detail of a job that goes on."""
    gang, newest, last = snapshot.gang, snapshot.newest, snapshot.last_ended
    before = last.message if last is not None and last is newest else ""
    if gang is None or gang.deleting:
        lost = gang or snapshot.deleted_gang
        # Those that the controller deletes itself have ended.
        deleted = DELETED_GANG if lost is not None and lost.ended is None else ""
        words = "; ".join(dict.fromkeys(filter(None, (before, deleted))))
        return (Phase.RESTARTING, words) if snapshot.attempts else (Phase.PENDING, deleted)
    if gang.suspended:
        words = describe_queue(snapshot.workload, snapshot.queue_words, snapshot.queue_problem)
        return (Phase.SUSPENDED, words) if snapshot.attempts else (Phase.PENDING, words)
    hold, deleted = find_hold(snapshot), describe_deletion(find_deleted_pod(gang, snapshot.all_pods))
    if newest is not None and newest.generation == snapshot.job.generation and is_running(newest, snapshot):
        if hold is None or newest.is_registered:
            return Phase.RUNNING, ""
        # Its first node has claimed the attempt, and waits for others that cannot start.
        return (Phase.STARTING if newest is snapshot.attempts[0] else Phase.RESTARTING), hold.detail
    if not snapshot.attempts:
        detail = hold.detail if hold else "its pods run, and have not reported yet"
        return Phase.STARTING, "; ".join(filter(None, (deleted, detail)))
    return Phase.RESTARTING, "; ".join(filter(None, (before, deleted, hold.detail if hold else "")))


def is_running(attempt: Attempt, snapshot: Snapshot) -> bool:
    """Whether an attempt goes on. Where its first pod has completed, others may still work, or the cluster says so soon."""
    if any(pod.uid == attempt.claimed_by and pod.deleting for pod in snapshot.pods):
        return attempt.reason is ExitReason.COMPLETED  # else it saves, and another attempt follows
    return attempt.ended_at is None or attempt.reason is ExitReason.COMPLETED


def describe_queue(workload: WorkloadState | None, queue_words: str = "", problem: str = "") -> str:
    """What a suspended gang waits for, in Kueue's words.

    Kueue explains one of several gangs of the same shape, and does not try the others before it is admitted.
    """
    if workload is None:
        return problem or "waits for Kueue to see it"
    parts = (workload.evicted, remove_other_flavors(workload.waits_for))
    words = dict.fromkeys(IDENTIFIERS.sub("", part) for part in parts if part)
    if words or not queue_words:
        return "; ".join(words) or "waits in Kueue's queue"
    first = IDENTIFIERS.sub("", remove_other_flavors(queue_words))
    return f"waits in Kueue's queue, whose first job waits for this: {first}"


def remove_other_flavors(words: str) -> str:
    """Kueue's words without the flavors that the job cannot use; all of them where it can use none."""
    left = OTHER_FLAVOR.sub("", words).replace(", .", ".").removesuffix(", ")
    return left if "flavor" in left.partition(": ")[2] else words


def find_admission(snapshot: Snapshot) -> int | None:
    """When the job last stopped waiting for capacity; None while it never did."""
    gang, workload = snapshot.gang, snapshot.workload
    if gang is not None and not gang.suspended:
        if workload is None:
            return snapshot.job.admitted_at or gang.created_at
        return workload.admitted_at or snapshot.job.admitted_at
    return snapshot.job.admitted_at
