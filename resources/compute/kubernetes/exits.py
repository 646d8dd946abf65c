"""Why an attempt ended where its launcher could not say: from the states of its pods, as a pure function.

A launcher that is killed with its pod, or whose node is gone, reports nothing; the pod's status often does.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from recipes.contracts.exit_reason import ExitDocument, ExitReason, classify_message
from recipes.contracts.job import EXIT_PREEMPTED, EXIT_RESTART
from resources.compute.kubernetes.states import EVICTED, PodState

LOST_NODE_EVICTIONS = frozenset({"DeletionByTaintManager", "DeletionByPodGC"})
"""Reasons of DisruptionTarget for pods of a node that is gone, or does not answer."""
DISK_WORDS = ("ephemeral", "emptydir", "storage", "disk", "inodes")
"""In the kubelet's messages about evictions for disk space."""
LIMIT_WORD = "exceed"
"""In those for a volume or a pod that outgrew its own limit; a full node is "low on resource"."""
START_ERRORS = frozenset({"StartError", "ContainerCannotRun"})
MESSAGE_LINES = 5
"""Of a program's last output, which is its termination message."""


@dataclass(frozen=True)
class Exit:
    """How a pod, or the attempt that it belongs to, ended. `at` is in milliseconds, 0 where nobody knows."""

    reason: ExitReason
    message: str
    at: int = 0
    code: int | None = None
    outgrew_disk: bool = False
    """Evicted by the kubelet because it wrote more than its own limit, and not because the node is full."""

    @property
    def is_root_cause(self) -> bool:
        """Whether it happened to this pod: the others of a gang end by themselves because of it."""
        return self.reason is not ExitReason.COMPLETED and self.code not in (EXIT_PREEMPTED, EXIT_RESTART)


def explain_pod(pod: PodState, lost_nodes: Collection[str]) -> Exit | None:
    """Why the program of a pod ended, as far as the pod's status says; None while it may still run."""
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
    """What the launcher wrote for the kubelet; None where it was killed, or the message is the end of the log."""
    try:
        return ExitDocument.model_validate_json(pod.message)
    except ValidationError:
        return None


def eviction_reason(message: str) -> ExitReason:
    """Of the kubelet's words for an eviction: for the node's memory, or for disk space, the pod's own or the node's."""
    words = message.lower()
    if any(word in words for word in DISK_WORDS):
        return ExitReason.STORAGE_FULL
    return ExitReason.OOM_KILLED if "memory" in words else ExitReason.KILLED


def explain_gang(pods: Sequence[PodState], lost_nodes: Collection[str]) -> Exit | None:
    """Why a gang ended: what happened first to one of its pods, before the others ended because of it."""
    exits = [found for pod in pods if (found := explain_pod(pod, lost_nodes))]
    causes = [found for found in exits if found.is_root_cause] or [
        found for found in exits if found.reason is not ExitReason.COMPLETED
    ]
    if causes:
        return min(causes, key=lambda found: (found.at == 0, found.at))
    return exits[0] if exits and len(exits) == len(pods) else None


def pods_started_with(first: PodState, pods: Sequence[PodState]) -> list[PodState]:
    """The pods of the attempt that `first`, its pod of rank 0, belongs to: those created until the next of rank 0 was."""
    following = [pod.created_at for pod in pods if pod.rank == 0 and pod.created_at > first.created_at]
    end = min(following, default=float("inf"))
    mine = [pod for pod in pods if pod.generation == first.generation and first.created_at <= pod.created_at < end]
    return [pod for pod in mine if pod.rank != 0 or pod.uid == first.uid]
