"""Pods that somebody deleted while they waited to start: the gang fails, or starts again, and nothing else says why."""

from collections.abc import Sequence

from resources.compute.kubernetes.states import GangState, PodState


def find_deleted_pod(gang: GangState | None, pods: Sequence[PodState]) -> PodState | None:
    """The pod whose deletion ended the last start of a gang before any of its programs ran; None where that was not so.

    Args:
        pods: of the gang's generation, those that were deleted before those that exist.
    """
    if gang is None:
        return None
    starts: dict[str, list[PodState]] = {}
    for pod in sorted(pods, key=lambda each: each.created_at):
        if pod.created_at >= gang.created_at:
            starts.setdefault(pod.owner, []).append(pod)
    over = list(starts.values()) if gang.ended else list(starts.values())[:-1]
    if not over or any(pod.has_started for pod in over[-1]):
        return None
    # The others of the gang were deleted because of the first.
    return min((pod for pod in over[-1] if pod.deleted_at), key=lambda pod: pod.deleted_at, default=None)


def describe_deletion(pod: PodState | None) -> str:
    """That a pod was deleted, and why, where the cluster says so."""
    if pod is None:
        return ""
    why = f" ({pod.eviction_message or pod.eviction})" if pod.eviction else ""
    return f"pod {pod.name} was deleted before it started{why}"
