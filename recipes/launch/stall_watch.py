"""Detect that a gang makes no progress, and which rank the others wait for."""

from collections.abc import Mapping

from recipes.launch.rank_progress import RankProgress

PERIOD_SECONDS = 5.0
"""Interval between two reports of a node."""
SILENT_SECONDS = 15.0
"""A process that has not written its counters for this long is stopped, or hangs in native code."""


class StallWatch:
    """Tracks for how long the progress reported by a gang's ranks has not changed.

    Only time with reports counts: a suspended machine has not stalled.
    """

    def __init__(self, limit_seconds: float) -> None:
        self._limit_seconds = limit_seconds
        self._ranks: dict[int, dict[int, RankProgress]] = {}
        self._still_seconds = 0.0
        self._looked_at: float | None = None

    def report(self, node: int, ranks: Mapping[int, RankProgress]) -> None:
        """Record the counters of a node's processes; empty while they do not train."""
        before = self._ranks.get(node, {})
        self._ranks[node] = dict(ranks)
        if {rank: counts(each) for rank, each in before.items()} != {rank: counts(each) for rank, each in ranks.items()}:
            self._still_seconds = 0.0

    def find_stalled(self, now: float) -> dict[int, list[int]] | None:
        """Return the stalled ranks by node once the limit is exceeded, else None.

        Call every `PERIOD_SECONDS`.
        """
        elapsed = 0.0 if self._looked_at is None else now - self._looked_at
        self._looked_at = now
        self._still_seconds += min(elapsed, 2 * PERIOD_SECONDS)
        ranks = {rank: progress for reported in self._ranks.values() for rank, progress in reported.items()}
        if not ranks:
            self._still_seconds = 0.0
        if self._still_seconds < self._limit_seconds:
            return None
        stalled = find_culprits(ranks)
        return {node: found for node, reported in self._ranks.items() if (found := sorted(stalled & reported.keys()))}


def counts(progress: RankProgress) -> tuple[int, Mapping[str, int]]:
    return progress.events, progress.collectives


def find_culprits(ranks: Mapping[int, RankProgress]) -> set[int]:
    """Return the silent ranks, else those that wait for no other rank, else all.

    Silence is the stronger sign: a stopped rank may have started the next collective, which its peers then appear to miss.
    """
    silent = {rank for rank, progress in ranks.items() if progress.silent_seconds > SILENT_SECONDS}
    free = {rank for rank in ranks if not waits_for_another(rank, ranks)}
    return next((some for some in (silent, free) if some and len(some) < len(ranks)), set(ranks))


def waits_for_another(rank: int, ranks: Mapping[int, RankProgress]) -> bool:
    """Return whether `rank` has started a collective that another rank has not."""
    mine = ranks[rank]
    for other in ranks.values():
        shared = mine.collectives.keys() & other.collectives.keys()
        if any(mine.collectives[group] > other.collectives[group] for group in shared):
            return True
    return False
