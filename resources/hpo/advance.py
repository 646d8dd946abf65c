"""One look at a sweep that goes on: what is seen of its trials, what follows from it, and its pictures."""

import math
from collections.abc import Callable

from recipes.store import Store
from resources.hpo.plots import history_page, parallel_coordinates_page
from resources.hpo.step import next_step
from resources.hpo.trial import Observation, Point, Trial
from resources.metadata.database import Database
from resources.metadata.outbox import now_ms
from resources.metadata.sweeps import Snapshot, Sweeps
from resources.metadata.tracking.metrics import Metrics

PAGE = 10_000
"""Points that are read at a time, where an objective is logged at every step."""


def advance(database: Database, store: Store, sweep_id: str, is_gone: Callable[[str], bool]) -> bool:
    """Look once, and do what follows. Repeating it does nothing twice, wherever the one before was killed.

    Args:
        is_gone: whether nothing runs any more of a job that was told to stop.

    Returns whether anything changed.
    """
    sweeps = Sweeps(database)
    before = sweeps.snapshot(sweep_id)
    if before.sweep.status != "running":
        return False
    step = next_step(sweep_id, before.sweep.config, before.trials, observe(before, Metrics(database), is_gone), now_ms())
    if not step:
        return False
    after = {trial.number: trial for trial in (*before.trials, *step.changed)}
    if any(trial.has_ended for trial in step.changed):
        # Before the step is taken: a sweep that is completed has its pictures.
        draw(store, before, tuple(after.values()))
    return sweeps.take(before, step)


def observe(before: Snapshot, metrics: Metrics, is_gone: Callable[[str], bool]) -> dict[int, Observation]:
    """What is seen of each trial. Of those that have ended the points are read where others are judged by them."""
    config = before.sweep.config
    compared = config.strategy == "successive_halving"
    return {
        trial.number: Observation(
            status=status,
            reason=reason,
            points=points_of(metrics, trial, config.objective.metric) if compared or not trial.has_ended else (),
            is_gone=trial.status not in ("pruning", "cancelling") or is_gone(trial.job_id),
        )
        for trial, (status, reason) in zip(before.trials, before.jobs, strict=True)
        if compared or not trial.has_ended
    }


def points_of(metrics: Metrics, trial: Trial, key: str) -> tuple[Point, ...]:
    """The objective by step. A run that was killed and goes on may log a step again: the later one counts."""
    values: dict[int, float] = {}
    token = None
    while True:
        page = metrics.history(trial.job_id, key, PAGE, token)
        values |= {point.step: math.nan if point.is_nan else point.value for point in page.points}
        token = page.next_page_token
        if token is None:
            return tuple(Point(step, value) for step, value in values.items())


def draw(store: Store, before: Snapshot, trials: tuple[Trial, ...]) -> None:
    """The sweep's pictures, among the files of its parent run."""
    sweep = before.sweep
    folder = f"s3://hanzo-ml/runs/{sweep.id}/artifacts/plots"
    store.put_bytes(f"{folder}/parallel_coordinates.html", parallel_coordinates_page(sweep.config, trials).encode())
    store.put_bytes(f"{folder}/history.html", history_page(sweep.config, trials).encode())
