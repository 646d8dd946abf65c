"""Detect pods that were deleted while they waited to start.

Their gang fails or restarts, and no other object records the cause.
"""

from collections.abc import Sequence

from resources.compute.kubernetes.states import GangState, PodState


def find_deleted_pod(gang: GangState | None, pods: Sequence[PodState]) -> PodState | None:
    """Find the pod whose deletion ended the last start of a gang.

    None if a program of that start had run, or no pod was deleted.

    Args:
        pods: pods of the gang's generation: first the deleted ones, then the existing ones.
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
    """Describe the deletion of a pod, with its cause if the cluster reports one."""
    if pod is None:
        return ""
    why = f" ({pod.eviction_message or pod.eviction})" if pod.eviction else ""
    return f"pod {pod.name} was deleted before it started{why}"
