"""Derive from pod states why an attempt ended if its launcher could not report it.

A launcher that is killed with its pod, or whose node is lost, reports nothing; the pod's status often does. Pure functions.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from recipes.contracts.exit_reason import ExitDocument, ExitReason, classify_message
from recipes.contracts.job import EXIT_PREEMPTED, EXIT_RESTART
from resources.compute.kubernetes.states import EVICTED, PodState

LOST_NODE_EVICTIONS = frozenset({"DeletionByTaintManager", "DeletionByPodGC"})
"""DisruptionTarget reasons of pods whose node is gone or unreachable."""
DISK_WORDS = ("ephemeral", "emptydir", "storage", "disk", "inodes")
"""Words in the kubelet's messages about evictions for disk space."""
LIMIT_WORD = "exceed"
"""Word in its messages about a volume or pod that exceeded its own limit; a full node is "low on resource"."""
START_ERRORS = frozenset({"StartError", "ContainerCannotRun"})
MESSAGE_LINES = 5
"""Lines kept of a program's last output, which is its termination message."""


@dataclass(frozen=True)
class Exit:
    """How a pod or its attempt ended; `at` is in milliseconds, 0 if unknown."""

    reason: ExitReason
    message: str
    at: int = 0
    code: int | None = None
    outgrew_disk: bool = False
    """Evicted by the kubelet because it exceeded its own limit, not because the node is full."""

    @property
    def is_root_cause(self) -> bool:
        """Whether this pod caused the end of its gang, rather than ending because of another."""
        return self.reason is not ExitReason.COMPLETED and self.code not in (EXIT_PREEMPTED, EXIT_RESTART)


def explain_pod(pod: PodState, lost_nodes: Collection[str]) -> Exit | None:
    """Explain why a pod's program ended, from its status; None while it may run."""
    who = f"pod {pod.name} on node {pod.node}" if pod.node else f"pod {pod.name}"
    if pod.exit_reason == "OOMKilled":
        limit = f", its limit is {pod.memory_limit}" if pod.memory_limit else ""
        return Exit(ExitReason.OOM_KILLED, f"{who} was killed by the kernel for lack of memory{limit}", pod.finished_at)
    if pod.status_reason == EVICTED:
        reason, message = eviction_reason(pod.message), f"{who} was evicted: {pod.message}"
        outgrew_disk = reason is ExitReason.STORAGE_FULL and LIMIT_WORD in pod.message.lower()
        return Exit(reason, message, pod.finished_at, outgrew_disk=outgrew_disk)
    was_lost = pod.eviction in LOST_NODE_EVICTIONS or (pod.deleting and pod.node in lost_nodes)
    if was_lost and pod.exit_code != EXIT_PREEMPTED:
        return Exit(ExitReason.NODE_LOST, f"node {pod.node} was lost, with pod {pod.name}", pod.finished_at)
    if pod.exit_code is None and pod.phase != "Failed":
        return None
    if pod.eviction:
        return Exit(
            ExitReason.PREEMPTED,
            f"{who} was evicted: {pod.eviction_message or pod.eviction}",
            pod.finished_at,
            pod.exit_code,
        )
    return explain_code(pod, who)


def explain_code(pod: PodState, who: str) -> Exit:
    output = "\n".join(pod.message.splitlines()[-MESSAGE_LINES:])
    if pod.exit_code == 0:
        return Exit(ExitReason.COMPLETED, "", pod.finished_at, 0)
    if document := read_termination_message(pod):
        return Exit(document.reason, f"{who}: {document.message}", pod.finished_at, pod.exit_code)
    if pod.exit_reason in START_ERRORS:
        return Exit(ExitReason.BAD_CONFIGURATION, f"{who} cannot start its program: {output}", pod.finished_at)
    reason = classify_message(pod.exit_code, output)
    ended = "ended without an exit code" if pod.exit_code is None else f"ended with exit code {pod.exit_code}"
    return Exit(reason, f"{who} {ended}" + (f": {output}" if output else ""), pod.finished_at, pod.exit_code)


def read_termination_message(pod: PodState) -> ExitDocument | None:
    """Parse the launcher's termination message.

    None if the launcher was killed, or the message is the end of the log.
    """
    try:
        return ExitDocument.model_validate_json(pod.message)
    except ValidationError:
        return None


def eviction_reason(message: str) -> ExitReason:
    """Return the exit reason of a kubelet's eviction message.

    Evictions are for memory of the node, or for disk space of the pod or the node.
    """
    words = message.lower()
    if any(word in words for word in DISK_WORDS):
        return ExitReason.STORAGE_FULL
    return ExitReason.OOM_KILLED if "memory" in words else ExitReason.KILLED


def explain_gang(pods: Sequence[PodState], lost_nodes: Collection[str]) -> Exit | None:
    """Explain why a gang ended: by the earliest root cause among its pods."""
    exits = [found for pod in pods if (found := explain_pod(pod, lost_nodes))]
    causes = [found for found in exits if found.is_root_cause] or [
        found for found in exits if found.reason is not ExitReason.COMPLETED
    ]
    if causes:
        return min(causes, key=lambda found: (found.at == 0, found.at))
    return exits[0] if exits and len(exits) == len(pods) else None


def pods_started_with(first: PodState, pods: Sequence[PodState]) -> list[PodState]:
    """Return the pods of the attempt whose rank 0 pod is `first`.

    They are those created before the next pod of rank 0.
    """
    following = [pod.created_at for pod in pods if pod.rank == 0 and pod.created_at > first.created_at]
    end = min(following, default=float("inf"))
    mine = [pod for pod in pods if pod.generation == first.generation and first.created_at <= pod.created_at < end]
    return [pod for pod in mine if pod.rank != 0 or pod.uid == first.uid]
