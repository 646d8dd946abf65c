"""Find attempts whose pods could not report how they ended: a pure function."""

from collections.abc import Iterator
from dataclasses import dataclass

from recipes.contracts.exit_reason import ExitReason
from resources.compute.kubernetes.exits import Exit, explain_gang, explain_pod, pods_started_with
from resources.compute.kubernetes.phases import DELETED_GANG, Snapshot
from resources.compute.kubernetes.states import PodState
from resources.metadata.cluster_jobs import CANCEL
from resources.metadata.job_attempts import REPLACEABLE_REASONS, VAGUE_REASONS, Attempt

UNSEEN_MS = 90_000
"""Time after which a pod that is still unknown counts as deleted: a mirror lags at most 40 s."""
MAX_ADMISSION_DIFFERENCE_MS = 5_000
"""Clock difference between API server and database. An attempt begins at least a second after its gang's admission."""
MAX_CLOCK_DIFFERENCE_MS = 15_000
"""Clock difference between nodes and database: an event that a node dates up to this much later than the end of an attempt
may have preceded it."""
EVICTED_MESSAGE = "its nodes were needed for another job"
SEEN_BY_CLUSTER = frozenset({ExitReason.OOM_KILLED, ExitReason.STORAGE_FULL, ExitReason.NODE_LOST})
"""Reasons that end an attempt at once: the surviving launchers know less about the cause."""


@dataclass(frozen=True)
class Ending:
    """How an attempt ended, and when, in milliseconds; 0 if unknown.

    `attempt` is None if its first pod, `unclaimed`, ended before it claimed an attempt number.
    """

    attempt: int | None
    reason: ExitReason
    message: str
    at: int = 0
    unclaimed: PodState | None = None


def find_endings(snapshot: Snapshot) -> list[Ending]:
    """Return the endings to record, oldest first; empty if the launchers reported all."""
    return [*end_claimed(snapshot), *end_unclaimed(snapshot)]


def all_pods(snapshot: Snapshot) -> list[PodState]:
    """Return existing and deleted pods."""
    existing = {pod.uid for pod in snapshot.pods}
    return [*snapshot.pods, *(pod for pod in snapshot.deleted_pods if pod.uid not in existing)]


def end_claimed(snapshot: Snapshot) -> Iterator[Ending]:
    pods = [*all_pods(snapshot)]
    for attempt in snapshot.attempts:
        is_open = attempt.ended_at is None
        if not is_open and attempt.reason not in REPLACEABLE_REASONS:
            continue
        first = next((pod for pod in pods if pod.uid == attempt.claimed_by), None)
        seen = explain_gang(pods_started_with(first, pods), snapshot.lost_nodes) if first else None
        if not is_open:
            if seen is not None and replaces(seen, attempt):
                yield Ending(attempt.attempt, seen.reason, seen.message, seen.at)
        elif (seen is not None and seen.reason in SEEN_BY_CLUSTER) or is_over(first, attempt, snapshot):
            if seen is None and first is not None and first.exit_code == 0:
                continue  # the other pods still work
            found = seen or explain_absence(first, snapshot)
            if found.reason is ExitReason.KILLED and snapshot.gang is not None:
                # Killed because it did not save in time, which is not the program's fault.
                if snapshot.gang.suspended:
                    found = explain_absence(first, snapshot)
                elif was_evicted_during(attempt, snapshot):
                    found = Exit(ExitReason.PREEMPTED, EVICTED_MESSAGE, found.at)
            yield Ending(attempt.attempt, found.reason, found.message, found.at)


def was_evicted_during(attempt: Attempt, snapshot: Snapshot) -> bool:
    """Return whether Kueue evicted an attempt and has readmitted its gang since."""
    workload = snapshot.workload
    if workload is None or workload.admitted_at is None:
        return False
    is_same = workload.evicted or workload.queued_at <= attempt.started_at
    return bool(is_same) and workload.admitted_at > attempt.started_at + MAX_ADMISSION_DIFFERENCE_MS


def replaces(seen: Exit, attempt: Attempt) -> bool:
    """Return whether the cluster's reason replaces the one that the launchers reported.

    A pod that exceeds its disk limit gets a SIGTERM, so its launcher reports a preemption. Counted as a preemption, it would
    be restarted and evicted endlessly.
    """
    if attempt.reason is ExitReason.PREEMPTED:
        return seen.outgrew_disk
    return seen.is_root_cause and seen.reason not in VAGUE_REASONS and is_cause(seen, attempt)


def is_cause(seen: Exit, attempt: Attempt) -> bool:
    """Return whether the exit preceded the end of the attempt.

    A later one is a consequence: a hanging pod is killed after its grace period.
    """
    return attempt.ended_at is None or seen.at <= attempt.ended_at + MAX_CLOCK_DIFFERENCE_MS


def is_over(first: PodState | None, attempt: Attempt, snapshot: Snapshot) -> bool:
    """Return whether the first pod of an attempt will not run any more."""
    if first is None:
        return snapshot.now - attempt.started_at > UNSEEN_MS
    return first.has_ended or all(pod.uid != first.uid for pod in snapshot.pods)


def explain_absence(first: PodState | None, snapshot: Snapshot) -> Exit:
    """Explain why the pods of an attempt are gone if they reported nothing."""
    job, gang, workload = snapshot.job, snapshot.gang, snapshot.workload
    if job.wanted == CANCEL:
        return Exit(ExitReason.CANCELLED, "cancelled")
    if first is not None and first.generation < job.generation:
        return Exit(ExitReason.PREEMPTED, f"generation {job.generation} has replaced it")
    if gang is None or gang.deleting:
        return Exit(ExitReason.KILLED, DELETED_GANG)
    if gang.suspended:
        return Exit(ExitReason.PREEMPTED, (workload.evicted if workload else "") or EVICTED_MESSAGE)
    if first is None:
        return Exit(ExitReason.UNKNOWN, "its pods are gone and left no exit reason")
    return Exit(ExitReason.KILLED, f"pod {first.name} was deleted")


def end_unclaimed(snapshot: Snapshot) -> Iterator[Ending]:
    """Yield endings of first pods whose container ended before claiming an attempt."""
    claimed = {attempt.claimed_by for attempt in snapshot.attempts}
    pods = all_pods(snapshot)
    for pod in sorted(pods, key=lambda each: each.created_at):
        mine = pod.generation == snapshot.job.generation and pod.created_at >= snapshot.job.created_at - 1000
        if any(later.uid in claimed and later.created_at > pod.created_at for later in pods):
            continue  # an attempt number for this pod would fence off the attempt of the later one
        if not mine or pod.rank != 0 or pod.uid in claimed or pod.exit_code in (None, 0):
            continue
        if seen := explain_pod(pod, snapshot.lost_nodes):
            yield Ending(None, seen.reason, seen.message, seen.at, pod)
