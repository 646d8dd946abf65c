"""What objects of the cluster say about a job, read from their JSON into small values: gang, workload, pod and node."""

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
"""Reason of a pod's status where the kubelet ended it, for lack of memory or disk space."""
CONFIG_REASONS = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})


def milliseconds(timestamp: str | None) -> int:
    """Of an RFC 3339 time, since 1970; 0 for none."""
    return round(datetime.fromisoformat(timestamp).timestamp() * 1000) if timestamp else 0


def find_condition(item: Mapping[str, Any], type: str, status: str = "True") -> Condition | None:
    """The condition of an object that has this type and status now."""
    conditions = item.get("status", {}).get("conditions") or []
    return next((found for found in conditions if found["type"] == type and found["status"] == status), None)


def read_generation(item: Mapping[str, Any]) -> int:
    """Of the job whose object this is; 0 for an object that carries none."""
    return int((item["metadata"].get("annotations") or {}).get(GENERATION_ANNOTATION, 0))


def job_name(item: Mapping[str, Any]) -> str:
    """Name of the job whose object this is, in all its generations."""
    return str((item["metadata"].get("labels") or {}).get(JOB_LABEL, ""))


@dataclass(frozen=True)
class GangState:
    """A JobSet, or an Indexed Job. `reason` and `message` are why it ended, of one that did.

    `priority_class` is Kueue's; empty of one that does not wait in its queue.

    A JobSet restarts its pods by itself, unless it may not (`maxRestarts: 0`), as where the pods of a failed job are kept.
    An Indexed Job of several pods is created again.
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
    """Of both kinds: their conditions differ in one name, Completed and Complete."""
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
    """Kueue's view of a gang. `waits_for` and `evicted` are its own words; `timed_out`: max-exec-time-seconds is used up."""

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
        """Sorts as Kueue's queue does: by priority, then by the time of creation or of the last eviction."""
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
    """A pod of a gang. `exit_code` is of its program's container, once that has ended.

    Args:
        job: name of its job, in all generations.
        owner: uid of its batch/v1 Job, which is another one after each restart of the gang, and the same after a suspension.
        deleted_at: when its deletion was asked for, in milliseconds; 0 if it was not.
        eviction: reason of its condition DisruptionTarget, such as DeletionByTaintManager, and its words.
        status_reason: `Evicted` where the kubelet did it, with `message` as its words.
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
        """Whether its program has run, or runs. A pod that is deleted before is marked as failed, too."""
        return self.running or self.exit_code is not None


def read_pod(item: Mapping[str, Any]) -> PodState:
    metadata, status = item["metadata"], item.get("status", {})
    containers = status.get("containerStatuses") or [{}]
    state = containers[0].get("state") or {}
    container = item["spec"]["containers"][0]
    terminated, waiting = state.get("terminated") or {}, state.get("waiting") or {}
    scheduled, unscheduled = find_condition(item, "PodScheduled"), find_condition(item, "PodScheduled", "False")
    disruption = find_condition(item, "DisruptionTarget")
    # Of an evicted pod the kubelet's own words: what the container said last explains nothing.
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
        # A deletion with a grace period is marked with the time at which that is over.
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
    """Nodes that do not answer, by name. One that is not in `nodes` is gone as well."""
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
