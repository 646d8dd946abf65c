"""Consistent view of gangs, workloads, pods and nodes, read from mirrors."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from resources.compute.kubernetes.cluster import CONFIG_MAP, NODE, POD, WORKLOAD, Cluster, Item
from resources.compute.kubernetes.gang import JOB_APP
from resources.compute.kubernetes.states import (
    GangState,
    PodState,
    WorkloadState,
    job_name,
    lost_nodes,
    read_gang,
    read_pod,
    read_workload,
)
from resources.compute.kubernetes.submission import GANG_KINDS, place
from resources.compute.kubernetes.watch import SILENCE_SECONDS, Mirror

CURRENT_SECONDS = SILENCE_SECONDS + 10.0
"""A watch that is silent for that long has been dropped, and its successor got no answer either."""
OURS = f"app={JOB_APP}"
"""Label selector of the objects of jobs."""


@dataclass(frozen=True)
class ClusterState:
    """Contents of the mirrors.

    Args:
        gangs, deleted_gangs: by namespace and name; deleted ones with their last state.
        workloads: by the uid of the gang that owns them.
        pods, deleted_pods: by namespace and name of their job.
        queue_words: what the first Workload of each queue waits for, in Kueue's words, by namespace and name of the queue.
        config_maps: ConfigMaps of jobs, in all generations, by namespace and name.
        nodes: names of existing nodes; `lost_nodes` are those that are unreachable.
    """

    gangs: Mapping[tuple[str, str], GangState]
    deleted_gangs: Mapping[tuple[str, str], GangState]
    workloads: Mapping[str, WorkloadState]
    queue_positions: Mapping[str, int]
    queue_words: Mapping[tuple[str, str], str]
    pods: Mapping[tuple[str, str], Sequence[PodState]]
    deleted_pods: Mapping[tuple[str, str], Sequence[PodState]]
    config_maps: Mapping[tuple[str, str], Item]
    nodes: frozenset[str]
    lost_nodes: frozenset[str]

    def is_lost(self, pod: PodState) -> bool:
        """Return whether the node of a pod is unreachable or no longer exists."""
        return bool(pod.node) and (pod.node in self.lost_nodes or pod.node not in self.nodes)


class ClusterView:
    """Mirrors of all objects on which the controller bases its decisions."""

    def __init__(self, cluster: Cluster, gang_backend: str, changed: Callable[[], None]) -> None:
        self.gangs = Mirror(cluster, GANG_KINDS[gang_backend][0], changed, OURS)
        self.pods = Mirror(cluster, POD, changed, OURS)
        self.config_maps = Mirror(cluster, CONFIG_MAP, changed, OURS)
        self.nodes = Mirror(cluster, NODE, changed)
        # Kueue's Workloads do not have our labels.
        self.workloads = Mirror(cluster, WORKLOAD, changed) if gang_backend == "kueue" else None
        self.mirrors = [self.gangs, self.pods, self.config_maps, self.nodes]
        if self.workloads is not None:
            self.mirrors.append(self.workloads)

    def start(self) -> None:
        for mirror in self.mirrors:
            mirror.start()

    @property
    def problems(self) -> list[str]:
        """Descriptions of mirrors that are not current, for people."""
        return [f"{mirror.kind.plural}: {mirror.problem}" for mirror in self.mirrors if mirror.problem]

    @property
    def is_synced(self) -> bool:
        return all(mirror.is_synced for mirror in self.mirrors)

    @property
    def is_current(self) -> bool:
        """Whether all mirrors have recently received data from the API server."""
        return self.is_synced and all(mirror.silent_seconds < CURRENT_SECONDS for mirror in self.mirrors)

    def add(self, item: Item) -> None:
        """Add an object that was just created, before its watch event arrives."""
        for mirror in (self.gangs, self.config_maps):
            if item.get("kind") == mirror.kind.name:
                mirror.put(item)

    def read(self) -> ClusterState:
        workloads = [read_workload(item) for item in self.workloads.items()] if self.workloads else []
        nodes = self.nodes.items()
        queues = sort_queues(workloads)
        return ClusterState(
            gangs={place(item): read_gang(item) for item in self.gangs.items()},
            deleted_gangs={place(item): read_gang(item) for item in self.gangs.deleted()},
            workloads={found.owner: found for found in workloads},
            queue_positions={
                workload.uid: place for queue in queues.values() for place, workload in enumerate(queue, start=1)
            },
            queue_words={
                name: next((workload.waits_for for workload in queue if workload.waits_for), "")
                for name, queue in queues.items()
            },
            pods=by_job(self.pods.items()),
            deleted_pods=by_job(self.pods.deleted()),
            config_maps={place(item): item for item in self.config_maps.items()},
            nodes=frozenset(item["metadata"]["name"] for item in nodes),
            lost_nodes=lost_nodes(nodes),
        )


def by_job(items: Sequence[Item]) -> dict[tuple[str, str], list[PodState]]:
    """Group pods by namespace and name of their job, sorted by rank."""
    found: dict[tuple[str, str], list[PodState]] = defaultdict(list)
    for item in items:
        found[item["metadata"]["namespace"], job_name(item)].append(read_pod(item))
    for pods in found.values():
        pods.sort(key=lambda pod: (pod.rank, pod.created_at))
    return dict(found)


def sort_queues(workloads: Sequence[WorkloadState]) -> dict[tuple[str, str], list[WorkloadState]]:
    """Return waiting workloads by queue, in the order of the queue."""
    queues: dict[tuple[str, str], list[WorkloadState]] = defaultdict(list)
    for workload in workloads:
        if not workload.holds_quota and not workload.finished:
            queues[workload.queue].append(workload)
    for queue in queues.values():
        queue.sort(key=lambda waiting: waiting.order)
    return dict(queues)
