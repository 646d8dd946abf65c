"""Parse the state of gangs, workloads, pods, nodes and events from their JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from resources.compute.kubernetes.cluster import JOB
from resources.compute.kubernetes.gang import GENERATION_ANNOTATION, JOB_LABEL

Condition = Mapping[str, Any]

PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
RANK_ANNOTATION = "batch.kubernetes.io/job-completion-index"
MAX_EXECUTION_TIME = "MaximumExecutionTimeExceeded"
PULL_REASONS = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"})
EVICTED = "Evicted"
"""Status reason of a pod that the kubelet ended for lack of memory or disk space."""
CONFIG_REASONS = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})


def milliseconds(timestamp: str | None) -> int:
    """Return milliseconds since 1970 of an RFC 3339 time; 0 for none."""
    return round(datetime.fromisoformat(timestamp).timestamp() * 1000) if timestamp else 0


def find_condition(item: Mapping[str, Any], type: str, status: str = "True") -> Condition | None:
    """Return the condition of an object with this type and status."""
    conditions = item.get("status", {}).get("conditions") or []
    return next((found for found in conditions if found["type"] == type and found["status"] == status), None)


def read_generation(item: Mapping[str, Any]) -> int:
    """Return the generation of an object; 0 if it has none."""
    return int((item["metadata"].get("annotations") or {}).get(GENERATION_ANNOTATION, 0))


def job_name(item: Mapping[str, Any]) -> str:
    """Return the job name of an object, which is the same in all generations."""
    return str((item["metadata"].get("labels") or {}).get(JOB_LABEL, ""))


@dataclass(frozen=True)
class GangState:
    """State of a JobSet or an Indexed Job.

    `reason` and `message` say why it ended. `priority_class` is Kueue's; empty if it does not use Kueue.

    A JobSet restarts its pods itself, unless `maxRestarts` is 0, as when the pods of a failed job are kept. An Indexed Job
    of several pods is recreated.
    """

    uid: str
    name: str
    namespace: str
    generation: int
    created_at: int
    suspended: bool
    deleting: bool
    ended: Literal["succeeded", "failed"] | None
    reason: str
    message: str
    restarts_itself: bool
    priority_class: str


def read_gang(item: Mapping[str, Any]) -> GangState:
    """Parse a JobSet or Job; their conditions differ in one name, Completed and Complete."""
    metadata = item["metadata"]
    done = find_condition(item, "Completed") or find_condition(item, "Complete")
    failed = find_condition(item, "Failed")
    ended = done or failed
    return GangState(
        uid=metadata["uid"],
        name=metadata["name"],
        namespace=metadata["namespace"],
        generation=read_generation(item),
        created_at=milliseconds(metadata["creationTimestamp"]),
        suspended=bool(item["spec"].get("suspend", False)),
        deleting="deletionTimestamp" in metadata,
        ended="succeeded" if done else "failed" if failed else None,
        reason=str(ended.get("reason", "")) if ended else "",
        message=str(ended.get("message", "")) if ended else "",
        restarts_itself=item.get("kind") != JOB.name and (item["spec"].get("failurePolicy") or {}).get("maxRestarts") != 0,
        priority_class=str((metadata.get("labels") or {}).get(PRIORITY_LABEL, "")),
    )


@dataclass(frozen=True)
class WorkloadState:
    """Kueue's view of a gang.

    `waits_for` and `evicted` are Kueue's messages; `timed_out`: max-exec-time-seconds is used up.
    """

    uid: str
    owner: str
    queue: tuple[str, str]
    priority: int
    queued_at: int
    admitted_at: int | None
    holds_quota: bool
    waits_for: str
    evicted: str
    timed_out: bool
    finished: bool

    @property
    def order(self) -> tuple[int, int, str]:
        """Sort key of Kueue's queue: priority, then time of creation or last eviction."""
        return (-self.priority, self.queued_at, self.uid)


def read_workload(item: Mapping[str, Any]) -> WorkloadState:
    metadata, spec = item["metadata"], item["spec"]
    admitted, evicted = find_condition(item, "Admitted"), find_condition(item, "Evicted")
    waiting = find_condition(item, "QuotaReserved", "False")
    owners = metadata.get("ownerReferences") or [{}]
    reasons = [str(found.get("reason", "")) for found in item.get("status", {}).get("conditions") or []]
    return WorkloadState(
        uid=metadata["uid"],
        owner=str(owners[0].get("uid", "")),
        queue=(metadata["namespace"], str(spec.get("queueName", ""))),
        priority=int(spec.get("priority") or 0),
        queued_at=milliseconds(evicted["lastTransitionTime"] if evicted else metadata["creationTimestamp"]),
        admitted_at=milliseconds(admitted["lastTransitionTime"]) if admitted else None,
        holds_quota=find_condition(item, "QuotaReserved") is not None,
        waits_for=str(waiting.get("message", "")) if waiting else "",
        evicted=str(evicted.get("message", "")) if evicted else "",
        timed_out=any(MAX_EXECUTION_TIME in reason for reason in reasons),
        finished=find_condition(item, "Finished") is not None,
    )


@dataclass(frozen=True)
class PodState:
    """State of a gang's pod.

    Args:
        job: name of its job, the same in all generations.
        owner: uid of its batch/v1 Job, which changes with each restart of the gang, but not with a suspension.
        deleted_at: when its deletion was requested, in milliseconds; 0 if it was not.
        exit_code: exit code of the program's container, once it has ended.
        eviction: reason of its condition DisruptionTarget, such as DeletionByTaintManager.
        status_reason: `Evicted` if the kubelet evicted it, with the kubelet's text in `message`.
        waiting: reason why its container does not run yet, such as ImagePullBackOff.
    """

    name: str
    namespace: str
    uid: str
    job: str
    owner: str
    rank: int
    generation: int
    node: str
    created_at: int
    scheduled_at: int
    deleting: bool
    deleted_at: int
    phase: str
    running: bool
    image: str
    memory_limit: str
    waiting: str
    unschedulable: str
    exit_code: int | None
    exit_reason: str
    finished_at: int
    eviction: str
    eviction_message: str
    status_reason: str
    message: str

    @property
    def has_ended(self) -> bool:
        """Whether its program will not run any more."""
        return self.phase in ("Failed", "Succeeded") or self.exit_code is not None

    @property
    def has_started(self) -> bool:
        """Whether its program runs or has run.

        The phase does not show this: a pod that is deleted before its start is marked as failed, too.
        """
        return self.running or self.exit_code is not None


def read_pod(item: Mapping[str, Any]) -> PodState:
    metadata, status = item["metadata"], item.get("status", {})
    containers = status.get("containerStatuses") or [{}]
    state = containers[0].get("state") or {}
    container = item["spec"]["containers"][0]
    terminated, waiting = state.get("terminated") or {}, state.get("waiting") or {}
    scheduled, unscheduled = find_condition(item, "PodScheduled"), find_condition(item, "PodScheduled", "False")
    disruption = find_condition(item, "DisruptionTarget")
    # For an evicted pod prefer the kubelet's message: the container's last output does not explain the eviction.
    parts = (status, terminated) if status.get("reason") == EVICTED else (terminated, status)
    messages = [found.get("message") for found in (*parts, waiting, disruption or {})]
    return PodState(
        name=metadata["name"],
        namespace=metadata["namespace"],
        uid=metadata["uid"],
        job=job_name(item),
        owner=str((metadata.get("ownerReferences") or [{}])[0].get("uid", "")),
        rank=int((metadata.get("annotations") or {}).get(RANK_ANNOTATION, 0)),
        generation=read_generation(item),
        node=str(item["spec"].get("nodeName", "")),
        created_at=milliseconds(metadata["creationTimestamp"]),
        scheduled_at=milliseconds(scheduled["lastTransitionTime"]) if scheduled else 0,
        deleting="deletionTimestamp" in metadata,
        # The timestamp of a deletion with a grace period is the end of that period.
        deleted_at=max(
            0, milliseconds(metadata.get("deletionTimestamp")) - 1000 * (metadata.get("deletionGracePeriodSeconds") or 0)
        ),
        phase=str(status.get("phase", "Pending")),
        running="running" in state,
        image=str(container.get("image", "")),
        memory_limit=str(((container.get("resources") or {}).get("limits") or {}).get("memory", "")),
        waiting=str(waiting.get("reason", "")),
        unschedulable=str(unscheduled.get("message", "")) if unscheduled else "",
        exit_code=terminated.get("exitCode"),
        exit_reason=str(terminated.get("reason", "")),
        finished_at=milliseconds(terminated.get("finishedAt")),
        eviction=str(disruption.get("reason", "")) if disruption else "",
        eviction_message=str(disruption.get("message", "")) if disruption else "",
        status_reason=str(status.get("reason", "")),
        message=next((text.strip() for text in messages if text and text.strip()), ""),
    )


def lost_nodes(nodes: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """Return names of unreachable nodes; nodes that do not exist are lost as well."""
    return frozenset(node["metadata"]["name"] for node in nodes if find_condition(node, "Ready", "Unknown"))


@dataclass(frozen=True)
class ObjectEvent:
    """An event about a pod or a gang."""

    about: str
    reason: str
    message: str
    last_seen: int
    is_warning: bool


def read_event(item: Mapping[str, Any]) -> ObjectEvent:
    seen = (item.get("series") or {}).get("lastObservedTime") or item.get("lastTimestamp") or item.get("eventTime")
    return ObjectEvent(
        about=str(item["involvedObject"].get("name", "")),
        reason=str(item.get("reason", "")),
        message=str(item.get("message", "")),
        last_seen=milliseconds(seen or item["metadata"].get("creationTimestamp")),
        is_warning=item.get("type") == "Warning",
    )
