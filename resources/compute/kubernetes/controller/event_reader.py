"""Events about a gang whose pods do not start, read from the cluster at most every few seconds."""

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from resources.compute.kubernetes.cluster import EVENT, Cluster, ClusterError
from resources.compute.kubernetes.phases import Snapshot, find_hold
from resources.compute.kubernetes.states import ObjectEvent, read_event
from resources.metadata.cluster_jobs import GenerationKey

log = logging.getLogger(__name__)

INTERVAL_SECONDS = 3.0
"""Between two requests for the events of one job."""
MAX_HELD_PODS = 3
"""Of a job, whose events are read."""


@dataclass(frozen=True)
class SeenEvents:
    at: float
    events: Sequence[ObjectEvent]


class EventReader:
    """Reads the events of gangs that hold their nodes and do not run."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._seen: dict[GenerationKey, SeenEvents] = {}

    def read(self, snapshot: Snapshot) -> Sequence[ObjectEvent]:
        """Events since the newest attempt ended, oldest first; none of a gang that nothing holds."""
        gang, key = snapshot.gang, snapshot.job.generation_key
        if gang is None or find_hold(snapshot) is None:
            self._seen.pop(key, None)
            return ()
        seen = self._seen.get(key)
        if seen is not None and time.monotonic() - seen.at < INTERVAL_SECONDS:
            return seen.events
        held = [pod for pod in snapshot.current_pods if not pod.running and not pod.has_ended]
        names = [pod.name for pod in held[:MAX_HELD_PODS]]
        if len(snapshot.current_pods) < snapshot.limits.nodes:
            names += [gang.name, f"{gang.name}-node-0"]  # the JobSet, or the Job, and the JobSet's child
        found = [event for name in names for event in self._list(gang.namespace, name)]
        since = max((pod.scheduled_at for pod in held), default=0)
        since = max(since, (snapshot.newest and snapshot.newest.ended_at) or 0) - 1000
        current = sorted((one for one in found if one.last_seen >= since), key=lambda one: one.last_seen)
        self._seen[key] = SeenEvents(time.monotonic(), current)
        return current

    def forget(self, active: Collection[GenerationKey]) -> None:
        """Drop what is cached of all other jobs."""
        for key in self._seen.keys() - active:
            del self._seen[key]

    def _list(self, namespace: str, name: str) -> list[ObjectEvent]:
        try:
            items, _ = self._cluster.list(EVENT, namespace, fieldSelector=f"involvedObject.name={name}")
        except ClusterError as problem:  # they only explain: the rest of the pass goes on
            log.warning("events of %s cannot be read: %s", name, problem)
            return []
        return [read_event(item) for item in items]
