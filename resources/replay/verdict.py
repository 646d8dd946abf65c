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

# Checks whether the tracked losses of a run equal those in its result: a stored metric can be changed.
#
# The tracker only adds points, and orders them by the time of the machine that logged them: with a slow clock, a loss from
# before a divergence was once taken for the last one. So times are ignored here. A step has as many losses as it was
# trained, one of which must be the run's. If it was trained twice on the same samples, they may differ in their last digits
# (in smaller micro-batches, on other GPUs), and count as one.

LOSS_METRIC = "train/loss"
PAGE_POINTS = 25_000
LOSS_TOLERANCE = 0.02
"""Relative tolerance: two orders of summation in bfloat16 may differ this much."""


def read_tracked_losses(database: Database, run_id: str) -> dict[int, list[float]]:
    """Return all losses of each step."""
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
    """Return the first step for which a wrong loss is tracked, or None.

    `then` is the run's, `now` the tracked loss.

    Args:
        repeated: steps that were trained again, on other samples or from other weights.
    """
    for step in sorted(losses.keys() & tracked.keys()):
        then = comparable_loss(losses, step)
        others = [loss for loss in distinct_losses(tracked[step]) if not is_close(then, loss)]
        has_own = any(is_close(then, comparable_loss({step: loss}, step)) for loss in tracked[step])
        if not has_own or len(others) > sum(step in steps for steps in repeated):
            return StepDifference(step=step, then=then, now=others[-1])
    return None


def distinct_losses(losses: Sequence[float]) -> list[Loss]:
    """Return the losses without those that are close to an earlier one."""
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
    """The result of comparing a replay with its first run.

    `equal` means that all losses and the hashes of the final weights are equal, and that the first run's tracked losses are
    those it had; `untrue` is the first step where they are not. If the runs differ, `environment` and `unrepeated` may
    explain it: the replay ran elsewhere, or only one of the runs recovered from an incident.
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
        raise invalid(f"run '{replay_id}' is not a replay: create one with `hanzo-ml run replay {replay_id}`")
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
