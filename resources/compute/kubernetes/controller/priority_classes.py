"""Detect missing priority classes.

Kueue ignores a gang with a missing class and reports it only in its own log.
"""

import time

from resources.compute.kubernetes.cluster import WORKLOAD_PRIORITY_CLASS, Cluster, ClusterError, NotFound
from resources.compute.kubernetes.phases import Snapshot

PATIENCE_MS = 5_000
"""How long Kueue may take to see a gang."""
INTERVAL_SECONDS = 5.0
"""Time between two requests for one class."""


class PriorityClasses:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._missing: dict[str, bool] = {}
        self._read_at: dict[str, float] = {}

    def explain(self, snapshot: Snapshot) -> str:
        """Explain why Kueue has no Workload for a waiting gang.

        Empty if the priority class exists or its state is unknown.
        """
        gang = snapshot.gang
        if gang is None or not gang.suspended or snapshot.workload is not None or not gang.priority_class:
            return ""
        if snapshot.now - gang.created_at < PATIENCE_MS or not self._is_missing(gang.priority_class):
            return ""
        return (
            f"Kueue has no WorkloadPriorityClass '{gang.priority_class}': create it with "
            "`hanzo-ml cluster render | kubectl apply --server-side -f -`"
        )

    def _is_missing(self, name: str) -> bool:
        now = time.monotonic()
        if now - self._read_at.get(name, float("-inf")) >= INTERVAL_SECONDS:
            self._read_at[name] = now
            try:
                self._cluster.read(WORKLOAD_PRIORITY_CLASS, None, name)
                self._missing[name] = False
            except NotFound:
                self._missing[name] = True
            except ClusterError:  # not allowed, or no answer
                self._missing[name] = False
        return self._missing[name]
