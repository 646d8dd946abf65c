"""Whether the tracker tells of a run what its result says: a metric can be changed where it is stored.

Steps that were done twice may differ in their last digits (in smaller micro-batches, on other GPUs), and are tracked once.
"""

import math
from collections.abc import Mapping

from resources.metadata.database import Database
from resources.metadata.tracking.metrics import Metrics
from resources.replay.comparison import StepDifference, loss_at

LOSS = "train/loss"
PAGE = 25_000
CLOSE = 0.02
"""Relative: as far apart as two ways of adding up in bfloat16 may come."""


def tracked_losses(database: Database, run_id: str) -> dict[int, float]:
    """Step -> its newest loss: of one that was done anew after a divergence, that of the second time."""
    metrics, token = Metrics(database), None
    newest: dict[int, tuple[int, float]] = {}
    while True:
        page = metrics.history(run_id, LOSS, PAGE, token)
        for point in page.points:
            if point.step not in newest or newest[point.step][0] <= point.timestamp:
                newest[point.step] = (point.timestamp, point.number)
        token = page.next_page_token
        if token is None:
            return {step: loss for step, (_, loss) in newest.items()}


def first_untrue(losses: Mapping[int, float | None], tracked: Mapping[int, float]) -> StepDifference | None:
    """The first step of which another loss is tracked, `now`, than the run had, `then`. None where all are true."""
    pairs = ((step, loss_at(losses, step), loss_at(tracked, step)) for step in sorted(losses.keys() & tracked.keys()))
    return next((StepDifference(step=step, then=a, now=b) for step, a, b in pairs if not alike(a, b)), None)


def alike(then: object, now: object) -> bool:
    if isinstance(then, float) and isinstance(now, float):
        return math.isclose(then, now, rel_tol=CLOSE)
    return then == now
