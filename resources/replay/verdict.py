"""Judge a replay: compare both runs, and check the tracked losses."""

import math
from collections.abc import Mapping, Sequence

from recipes.contracts.frozen_model import FrozenModel
from recipes.storage.artifact_store import Store
from resources.errors import invalid
from resources.metadata.database import Database
from resources.metadata.tracking.metrics import Metrics
from resources.replay.comparison import (
    Difference,
    FileDifference,
    Loss,
    StepDifference,
    Unrepeated,
    comparable_loss,
    compare_runs,
    environment_differences,
    find_unrepeated,
    process_differences,
)
from resources.replay.submission import FinishedRun, read_finished_run, read_weight_hashes

# Whether the tracker tells of a run what its result says: a metric can be changed where it is stored.
#
# It adds points and replaces none, and its only order is by time, which is that of whichever machine logged: where a
# clock was behind, what a run came to before a divergence was taken for its last word. So times say nothing here. A step
# has as many losses as it was done, one of them the run's. Done twice on the same samples they may differ in their last
# digits (in smaller micro-batches, on other GPUs), and count as one.

LOSS_METRIC = "train/loss"
PAGE_POINTS = 25_000
LOSS_TOLERANCE = 0.02
"""Relative: as far apart as two ways of adding up in bfloat16 may come."""


def read_tracked_losses(database: Database, run_id: str) -> dict[int, list[float]]:
    """Step -> all of its losses."""
    metrics, token = Metrics(database), None
    found: dict[int, list[float]] = {}
    while True:
        page = metrics.history(run_id, LOSS_METRIC, PAGE_POINTS, token)
        for point in page.points:
            found.setdefault(point.step, []).append(point.number)
        token = page.next_page_token
        if token is None:
            return found


def find_wrong_loss(
    losses: Mapping[int, float | None], tracked: Mapping[int, Sequence[float]], repeated: Sequence[range] = ()
) -> StepDifference | None:
    """The first step of which another loss is tracked, `now`, than the run had, `then`. None where all are true.

    Args:
        anew: steps that were done once more, on other samples or from other weights.
    """
    for step in sorted(losses.keys() & tracked.keys()):
        then = comparable_loss(losses, step)
        others = [loss for loss in distinct_losses(tracked[step]) if not is_close(then, loss)]
        has_own = any(is_close(then, comparable_loss({step: loss}, step)) for loss in tracked[step])
        if not has_own or len(others) > sum(step in steps for steps in repeated):
            return StepDifference(step=step, then=then, now=others[-1])
    return None


def distinct_losses(losses: Sequence[float]) -> list[Loss]:
    """Each but for those that one before it is like."""
    found: list[Loss] = []
    for loss in losses:
        comparable = comparable_loss({0: loss}, 0)
        if not any(is_close(other, comparable) for other in found):
            found.append(comparable)
    return found


def is_close(then: object, now: object) -> bool:
    if isinstance(then, float) and isinstance(now, float):
        return math.isclose(then, now, rel_tol=LOSS_TOLERANCE)
    return then == now


class Verdict(FrozenModel):
    """`equal` means every loss and the hash of the final weights, and that no other loss is tracked of the first run than it
    had: `untrue` is the first step of which one is. `environment` and `find_unrepeated` may explain why they are not: the
    replay
    computed elsewhere, or only one of the two runs was healed of something.
    """

    run: str
    replay: str
    equal: bool
    steps: int
    first_difference: StepDifference | None
    untrue: StepDifference | None
    weights: tuple[FileDifference, ...]
    environment: tuple[Difference, ...]
    unrepeated: tuple[Unrepeated, ...]


def read_verdict(database: Database, store: Store, replay_id: str) -> Verdict:
    """Compare a completed replay with its first run.

    Raises:
        HanzoError: there is no such run, it is not completed, or it is no replay.
    """
    replay = read_finished_run(database, store, replay_id)
    original = replay.job.replay_of
    if original is None:
        raise invalid(f"run '{replay_id}' is no replay: `hanzo-ml run replay {replay_id}` makes one of it")
    return judge_replay(read_finished_run(database, store, original), replay, read_tracked_losses(database, original), store)


def judge_replay(first: FinishedRun, replay: FinishedRun, tracked: Mapping[int, Sequence[float]], store: Store) -> Verdict:
    untrue = find_wrong_loss(first.losses, tracked, first.repeated_steps)
    found = compare_runs(first.losses, replay.losses, read_weight_hashes(first, store), read_weight_hashes(replay, store))
    return Verdict(
        run=first.job.id,
        replay=replay.job.id,
        equal=found.equal and untrue is None,
        steps=found.steps,
        first_difference=found.first_difference,
        untrue=untrue,
        weights=found.weights,
        environment=(
            *environment_differences(first.record.environment, first.machine, replay.record.environment, replay.machine),
            *process_differences(first.processes, replay.processes),
        ),
        unrepeated=find_unrepeated(first.incidents, replay.incidents),
    )
