"""Decide the phase of a cluster job from its row, attempts and Kubernetes objects."""

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
"""An attempt that ran this long counts as progress, like one that saved a checkpoint: it resets the failure count."""
DELETED_GANG = "the objects of the job were deleted from the cluster"
IDENTIFIERS = re.compile(r" \(UID: [^)]*\)|; preemptor path: .*?(?=$|; [^p])")
"""Parts of Kueue's preemption messages that are useful only to its developers."""
OTHER_FLAVOR = re.compile(
    r"(insufficient quota for \S+ in flavor [\w.-]*\w, previously considered podsets requests \(\S*\)"
    r" \+ current podset request \(\S*\) > maximum capacity \(0\)"
    r"|untolerated taint \{[^}]*\} in flavor [\w.-]*\w"
    r"|flavor [\w.-]*\w doesn't match node affinity)(, )?"
)
"""Part of Kueue's message for a waiting Workload: a flavor without the resource, or reserved for other jobs."""
DEADLINE_EXCEEDED = "DeadlineExceeded"
"""Reason of a Job that exceeded its `activeDeadlineSeconds`."""
CREATION_FAILURES = frozenset({"FailedCreate", "JobCreationFailed", "HeadlessServiceCreationFailed"})
"""Event reasons of a JobSet or Job whose children cannot be created."""
INVALID_CHILD = re.compile(r"is invalid:|Invalid value", re.IGNORECASE)
"""Event message of a child that the API server rejects for its contents: retrying does not help. An object that a webhook
denies may be accepted later: Kueue's webhooks deny a child whose parent they have not seen yet.
"""


@dataclass(frozen=True)
class Limits:
    """Limits of a job: pods, time over all attempts, and failed attempts.

    `start_ms`: how long a pod may wait for its image or its configuration. `elastic`: the job accepts fewer nodes. `shares`:
    its pods end independently. `keeps_failed`: its pods are kept for `keep_ms` after it failed.
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
    """Everything known about a job at one moment; times in milliseconds since 1970.

    Args:
        attempts: attempts since the job was submitted, oldest first.
        queue_words: what the first Workload in its queue waits for.
        pods: existing pods of all generations; `deleted_pods` holds the last states of deleted ones.
        events: events about its pods and its gang, oldest first; only while the gang is starting.
        queue_problem: why Kueue does not see the gang, if known.
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
        """Pods of the newest generation, without terminating ones."""
        return [pod for pod in self.pods if pod.generation == self.job.generation and not pod.deleting]

    @property
    def all_pods(self) -> list[PodState]:
        """Pods of the newest generation: first deleted, then existing ones."""
        return [pod for pod in (*self.deleted_pods, *self.pods) if pod.generation == self.job.generation]


def used_ms(snapshot: Snapshot) -> int:
    """Return the run time of all attempts, which excludes waiting."""
    return sum((found.ended_at or snapshot.now) - found.started_at for found in snapshot.attempts)


def count_failures(attempts: Sequence[Attempt]) -> int:
    """Count the attempts against the restart limit since the last one with progress."""
    count = 0
    for attempt in attempts:
        ran_ms = (attempt.ended_at or attempt.started_at) - attempt.started_at
        if attempt.saved_at is not None or ran_ms > PROGRESS_MS:
            count = 0
        count += attempt.counted
    return count


@dataclass(frozen=True)
class End:
    """The end of a job, which has ended or must end.

    Args:
        waits_for_pods: its pods may save a checkpoint first.
        is_lasting: the end follows from database rows. Otherwise it follows from the gang, which must not be deleted before
            the end is written.
    """

    reason: ExitReason
    detail: str
    waits_for_pods: bool = False
    is_lasting: bool = True


def find_end(snapshot: Snapshot) -> End | None:
    """Return why the job has ended or must end; None if it continues."""
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
        detail = f"it exceeded schedule.max_duration ({limit}): what it saved is kept, increase the limit to resume"
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
    # A job that has started before is configured correctly: a registry, volume or node is unavailable, so it is retried.
    return End(ExitReason.SUPERVISOR_FAILED if snapshot.attempts else ExitReason.BAD_CONFIGURATION, hold.detail)


def is_time_over(gang: GangState | None, workload: WorkloadState | None) -> bool:
    """Return whether the cluster stopped the gang because `max_duration` is used up.

    The cluster measures from the admission.
    """
    return (workload is not None and workload.timed_out) or (gang is not None and gang.reason == DEADLINE_EXCEEDED)


def needs_recreation(snapshot: Snapshot) -> bool:
    """Return whether the gang failed, does not restart itself, and may be retried.

    It may if the newest attempt's exit reason allows a restart, or no attempt began because a pod was deleted.
    """
    gang, newest = snapshot.gang, snapshot.newest
    if gang is None or gang.ended != "failed" or gang.restarts_itself:
        return False
    if newest is not None and newest.reason is not None and newest.reason.restarts:
        return True
    return find_deleted_pod(gang, snapshot.all_pods) is not None


def is_complete(snapshot: Snapshot) -> bool:
    """Return whether all nodes have jointly reported that the result is stored.

    The cluster reports it some seconds later. Pods that share work report independently.
    """
    newest = snapshot.newest
    return newest is not None and newest.reason is ExitReason.COMPLETED and not snapshot.limits.shares


def is_final(attempt: Attempt) -> bool:
    """Return whether an attempt failed with a reason that allows no restart."""
    return attempt.reason is not None and not attempt.reason.restarts and attempt.reason is not ExitReason.COMPLETED


def explain_failed_gang(snapshot: Snapshot, gang: GangState) -> End:
    """Explain the end of a gang that the cluster itself marked as failed."""
    seen = explain_gang(snapshot.current_pods, snapshot.lost_nodes)
    if seen is not None and seen.reason is not ExitReason.COMPLETED:
        return End(seen.reason, seen.message)
    last = snapshot.last_ended
    return End((last and last.reason) or ExitReason.UNKNOWN, (last and last.message) or gang.message)


@dataclass(frozen=True)
class Hold:
    """What keeps pods of an admitted gang from starting.

    `is_final`: waiting longer would not help.
    """

    detail: str
    is_final: bool = False


def find_hold(snapshot: Snapshot) -> Hold | None:
    """Return what holds the gang; None if it is suspended, absent, or fully running."""
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
        return Hold(f"waits for {pluralize(ending, 'pod')} of the previous attempt to end")
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
    # Prefer warnings to other events: "pulling image" is the last event before a volume is mounted.
    if warning := find_newest(about_pod, lambda event: event.is_warning):
        return Hold(f"pod {pod.name}: {warning.message}", is_late)
    if pulling := find_newest(about_pod, lambda event: event.reason == "Pulling"):
        return Hold(f"pod {pod.name} on node {pod.node}: {pulling.message}")
    return Hold(f"pod {pod.name} is starting" + (f" on node {pod.node}" if pod.node else ""))


def decide_state(snapshot: Snapshot) -> JobState:
    """Return the state of the job now."""
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
    """Return phase and detail of a job that continues."""
    gang, newest, last = snapshot.gang, snapshot.newest, snapshot.last_ended
    before = last.message if last is not None and last is newest else ""
    if gang is None or gang.deleting:
        lost = gang or snapshot.deleted_gang
        # Gangs that the controller itself deletes have ended.
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
        # Its first node has claimed the attempt and waits for others that cannot start.
        return (Phase.STARTING if newest is snapshot.attempts[0] else Phase.RESTARTING), hold.detail
    if not snapshot.attempts:
        detail = hold.detail if hold else "its pods run, and have not reported yet"
        return Phase.STARTING, "; ".join(filter(None, (deleted, detail)))
    return Phase.RESTARTING, "; ".join(filter(None, (before, deleted, hold.detail if hold else "")))


def is_running(attempt: Attempt, snapshot: Snapshot) -> bool:
    """Return whether an attempt is running.

    If its first pod has completed, others may still run, or the cluster will report the end soon.
    """
    if any(pod.uid == attempt.claimed_by and pod.deleting for pod in snapshot.pods):
        return attempt.reason is ExitReason.COMPLETED  # otherwise it saves, and another attempt follows
    return attempt.ended_at is None or attempt.reason is ExitReason.COMPLETED


def describe_queue(workload: WorkloadState | None, queue_words: str = "", problem: str = "") -> str:
    """Describe what a suspended gang waits for, in Kueue's words.

    Of several gangs with the same shape, Kueue explains only the first, and tries the others once that is admitted.
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
    """Remove flavors that the job cannot use from Kueue's message.

    The message is unchanged if the job can use none.
    """
    left = OTHER_FLAVOR.sub("", words).replace(", .", ".").removesuffix(", ")
    return left if "flavor" in left.partition(": ")[2] else words


def find_admission(snapshot: Snapshot) -> int | None:
    """Return when the job last stopped waiting for capacity; None if it never did."""
    gang, workload = snapshot.gang, snapshot.workload
    if gang is not None and not gang.suspended:
        if workload is None:
            return snapshot.job.admitted_at or gang.created_at
        return workload.admitted_at or snapshot.job.admitted_at
    return snapshot.job.admitted_at
