"""Find out that no process of a gang makes progress, and which one the others wait for: a pure class without a clock."""

from collections.abc import Mapping

from recipes.launch.rank_progress import RankProgress

PERIOD_SECONDS = 5.0
"""Between two reports of a node."""
SILENT_SECONDS = 30.0
"""A process that has not written its counts for so long is stopped, or hangs in native code."""


class StallWatch:
    """What the ranks of a gang have reported, and for how long none of it has changed.

    Only time during which reports came counts: a machine that was suspended has not stalled.
    """

    def __init__(self, limit_seconds: float) -> None:
        self._limit_seconds = limit_seconds
        self._ranks: dict[int, dict[int, RankProgress]] = {}
        self._still_seconds = 0.0
        self._looked_at: float | None = None

    def report(self, node: int, ranks: Mapping[int, RankProgress]) -> None:
        """What the processes of a node have written; none while they do not train."""
        before = self._ranks.get(node, {})
        self._ranks[node] = dict(ranks)
        if {rank: counts(each) for rank, each in before.items()} != {rank: counts(each) for rank, each in ranks.items()}:
            self._still_seconds = 0.0

    def find_stalled(self, now: float) -> dict[int, list[int]] | None:
        """Ranks to blame, by node, once nobody has made progress for the limit; None before. Ask every `PERIOD_SECONDS`."""
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
    """The ranks that wait for no other one; where that cannot be seen, those that are silent, else all."""
    free = {rank for rank in ranks if not waits_for_another(rank, ranks)}
    if free and len(free) < len(ranks):
        return free
    silent = {rank for rank, progress in ranks.items() if progress.silent_seconds > SILENT_SECONDS}
    return silent or set(ranks)


def waits_for_another(rank: int, ranks: Mapping[int, RankProgress]) -> bool:
    """Whether it has begun an exchange that another one has not."""
    mine = ranks[rank]
    for other in ranks.values():
        shared = mine.collectives.keys() & other.collectives.keys()
        if any(mine.collectives[group] > other.collectives[group] for group in shared):
            return True
    return False
