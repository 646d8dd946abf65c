"""Read events of gangs whose pods do not start, with a limited request rate."""

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

from resources.compute.kubernetes.cluster import EVENT, Cluster, ClusterError
from resources.compute.kubernetes.controller.requests import Requests
from resources.compute.kubernetes.phases import Snapshot, find_hold
from resources.compute.kubernetes.states import ObjectEvent, read_event
from resources.metadata.cluster_jobs import GenerationKey

log = logging.getLogger(__name__)

INTERVAL_SECONDS = 3.0
"""Time between two requests for the events of one job."""
MAX_HELD_PODS = 3
"""Pods of a job whose events are read."""
MAX_GANGS = 16
"""Gangs whose events are read in one pass: those whose last read is oldest."""


@dataclass(frozen=True)
class SeenEvents:
    at: float
    events: Sequence[ObjectEvent] = ()


NOT_SEEN = SeenEvents(at=float("-inf"))


class EventReader:
    """Reader of the events of admitted gangs that do not run."""

    def __init__(self, cluster: Cluster, requests: Requests) -> None:
        self._cluster = cluster
        self._requests = requests
        self._seen: dict[GenerationKey, SeenEvents] = {}

    def add_events(self, snapshots: Sequence[Snapshot]) -> list[Snapshot]:
        """Return the snapshots, with events for gangs that are held.

        The events are those since the newest attempt ended, oldest first.
        """
        held = [snapshot for snapshot in snapshots if find_hold(snapshot) is not None]
        self.forget({snapshot.job.generation_key for snapshot in held})
        before = time.monotonic() - INTERVAL_SECONDS
        due = sorted((found for found in held if self._seen_at(found) <= before), key=self._seen_at)[:MAX_GANGS]
        for snapshot, found in zip(due, self._requests.run([partial(self._read, each) for each in due]), strict=True):
            if isinstance(found, ClusterError):  # events are only explanations: continue the pass
                log.warning("events of %s cannot be read: %s", snapshot.job.name, found)
                found = ()
            self._seen[snapshot.job.generation_key] = SeenEvents(time.monotonic(), found)
        return [replace(snapshot, events=self._find(snapshot).events) for snapshot in snapshots]

    def forget(self, active: Collection[GenerationKey]) -> None:
        """Drop what is cached of all other jobs."""
        for key in self._seen.keys() - active:
            del self._seen[key]

    def _find(self, snapshot: Snapshot) -> SeenEvents:
        return self._seen.get(snapshot.job.generation_key, NOT_SEEN)

    def _seen_at(self, snapshot: Snapshot) -> float:
        return self._find(snapshot).at

    def _read(self, snapshot: Snapshot) -> Sequence[ObjectEvent]:
        """Read the events of a held gang. Raises ClusterError."""
        gang = snapshot.gang
        assert gang is not None  # nothing else is held
        held = [pod for pod in snapshot.current_pods if not pod.running and not pod.has_ended]
        names = [pod.name for pod in held[:MAX_HELD_PODS]]
        if len(snapshot.current_pods) < snapshot.limits.nodes:
            names += [gang.name, f"{gang.name}-node-0"]  # the JobSet, or the Job, and the JobSet's child
        found = [event for name in names for event in self._list(gang.namespace, name)]
        since = max((pod.scheduled_at for pod in held), default=0)
        since = max(since, (snapshot.newest and snapshot.newest.ended_at) or 0) - 1000
        return sorted((one for one in found if one.last_seen >= since), key=lambda one: one.last_seen)

    def _list(self, namespace: str, name: str) -> list[ObjectEvent]:
        items, _ = self._cluster.list(EVENT, namespace, fieldSelector=f"involvedObject.name={name}")
        return [read_event(item) for item in items]
