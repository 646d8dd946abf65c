"""Whether the tracker tells of a run what its result says: a metric can be changed where it is stored.

It adds points and replaces none, and its only order is by time, which is that of whichever machine logged: where a clock was
behind, what a run came to before a divergence was taken for its last word. So times say nothing here. A step has as many
losses as it was done, one of them the run's. Done twice on the same samples they may differ in their last digits (in smaller
micro-batches, on other GPUs), and count as one.
"""

import math
from collections.abc import Mapping, Sequence

from resources.metadata.database import Database
from resources.metadata.tracking.metrics import Metrics
from resources.replay.comparison import Loss, StepDifference, loss_at

LOSS = "train/loss"
PAGE = 25_000
CLOSE = 0.02
"""Relative: as far apart as two ways of adding up in bfloat16 may come."""


def tracked_losses(database: Database, run_id: str) -> dict[int, list[float]]:
    """Step -> all of its losses."""
    metrics, token = Metrics(database), None
    found: dict[int, list[float]] = {}
    while True:
        page = metrics.history(run_id, LOSS, PAGE, token)
        for point in page.points:
            found.setdefault(point.step, []).append(point.number)
        token = page.next_page_token
        if token is None:
            return found


def first_untrue(
    losses: Mapping[int, float | None], tracked: Mapping[int, Sequence[float]], anew: Sequence[range] = ()
) -> StepDifference | None:
    """The first step of which another loss is tracked, `now`, than the run had, `then`. None where all are true.

    Args:
        anew: steps that were done once more, on other samples or from other weights.
    """
    for step in sorted(losses.keys() & tracked.keys()):
        then = loss_at(losses, step)
        others = [loss for loss in distinct(tracked[step]) if not alike(then, loss)]
        has_own = any(alike(then, loss_at({step: loss}, step)) for loss in tracked[step])
        if not has_own or len(others) > sum(step in steps for steps in anew):
            return StepDifference(step=step, then=then, now=others[-1])
    return None


def distinct(losses: Sequence[float]) -> list[Loss]:
    """Each but for those that one before it is like."""
    found: list[Loss] = []
    for loss in losses:
        told = loss_at({0: loss}, 0)
        if not any(alike(other, told) for other in found):
            found.append(told)
    return found


def alike(then: object, now: object) -> bool:
    if isinstance(then, float) and isinstance(now, float):
        return math.isclose(then, now, rel_tol=CLOSE)
    return then == now
