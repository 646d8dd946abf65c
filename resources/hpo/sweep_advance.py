"""Advance a running sweep: observe its trials, apply the next step, and draw its plots.

A cancellation is also a step: it takes into account what has happened until then.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import replace

from recipes.storage import uris
from recipes.storage.artifact_store import Store
from resources.errors import conflict
from resources.hpo.sweep_plots import history_page, parallel_coordinates_page
from resources.hpo.sweep_rows import Snapshot
from resources.hpo.sweep_step import Step, decide_cancellation, decide_next_step
from resources.hpo.sweeps import Sweeps
from resources.hpo.trial import Observation, Point, Trial
from resources.metadata.database import Database
from resources.metadata.field_rules import LARGEST_DOUBLE, MetricPoint
from resources.metadata.outbox import now_ms
from resources.metadata.tracking.metrics import Metrics

log = logging.getLogger(__name__)

DELETED_REASON = "its run, or its experiment, was deleted"
PAGE_POINTS = 10_000
"""Page size for objectives that are logged at every step."""


def advance_sweep(database: Database, store: Store, sweep_id: str, is_stopped: Callable[[str], bool]) -> bool:
    """Observe a sweep, apply its next step, and return whether anything changed.

    It is safe to repeat after a kill.

    Args:
        is_stopped: whether all processes of a job that is to stop are gone.

    Returns whether anything changed.
    """
    sweeps = Sweeps(database)
    snapshot = sweeps.snapshot(sweep_id)
    if snapshot.sweep.status != "running":
        return False
    observed = observe_trials(snapshot, Metrics(database), is_stopped)
    if snapshot.is_deleted:
        return sweeps.apply_step(
            snapshot, decide_cancellation(snapshot.sweep.config, snapshot.trials, observed, now_ms(), DELETED_REASON)
        )
    step = decide_next_step(sweep_id, snapshot.sweep.config, snapshot.trials, observed, now_ms())
    if not step.changed and not step.new_trials:
        if step.end is None:
            return False
        store_plots(store, snapshot, step)  # before the end is recorded, so that a completed sweep has its plots
        return sweeps.apply_step(snapshot, step)
    # Recorded before drawing: an unavailable store must not delay the recorded results and new trials.
    if not sweeps.apply_step(snapshot, replace(step, end=None)):
        return False
    if step.end is not None:
        advance_sweep(database, store, sweep_id, is_stopped)
    elif any(trial.has_ended for trial in step.changed):
        store_plots(store, snapshot, step)
    return True


def cancel_sweep(database: Database, store: Store, sweep_id: str) -> None:
    """End a running sweep and cancel its trials' jobs.

    Raises:
        HanzoError: there is no such sweep, or it has ended.
    """
    sweeps = Sweeps(database)
    while True:  # until nothing changes between the observation and the end
        snapshot = sweeps.snapshot(sweep_id)
        if snapshot.sweep.status != "running":
            raise conflict(f"sweep '{sweep_id}' is {snapshot.sweep.status} already")
        observed = observe_trials(snapshot, Metrics(database), lambda job: True)
        step = decide_cancellation(snapshot.sweep.config, snapshot.trials, observed, now_ms(), "cancelled by the user")
        if sweeps.apply_step(snapshot, step):
            break
    if any(trial.has_result for trial in step.changed):
        store_plots(store, snapshot, step)


def observe_trials(snapshot: Snapshot, metrics: Metrics, is_stopped: Callable[[str], bool]) -> dict[int, Observation]:
    """Observe each trial.

    The points of ended trials are only read if other trials are compared with them.
    """
    config = snapshot.sweep.config
    needs_points = config.strategy == "successive_halving"
    return {
        trial.number: Observation(
            status=status,
            reason=reason,
            points=read_points(metrics, trial, config.objective.metric) if needs_points or not trial.has_ended else (),
            is_stopped=trial.status not in ("pruning", "cancelling") or is_stopped(trial.job_id),
        )
        for trial, (status, reason) in zip(snapshot.trials, snapshot.jobs, strict=True)
        if needs_points or not trial.has_ended
    }


def read_points(metrics: Metrics, trial: Trial, key: str) -> tuple[Point, ...]:
    """Read the objective at each step.

    A run that was killed and resumed may log a step again: the later value counts, with the time of the first.
    """
    points: dict[int, Point] = {}
    token = None
    while True:
        page = metrics.history(trial.job_id, key, PAGE_POINTS, token)
        for point in page.points:
            first = points.get(point.step)
            points[point.step] = Point(point.step, logged_value(point), first.time if first else point.timestamp)
        token = page.next_page_token
        if token is None:
            return tuple(points[step] for step in sorted(points))


def logged_value(point: MetricPoint) -> float:
    """Return a point's value.

    Infinity is stored as the largest double, which would otherwise count as a finite value.
    """
    return math.copysign(math.inf, point.value) if abs(point.value) >= LARGEST_DOUBLE else point.number


def store_plots(store: Store, snapshot: Snapshot, step: Step) -> None:
    """Store the sweep's plots among the files of its parent run.

    Called each time a trial ends.

    If the store is full or unavailable, the sweep continues without them.
    """
    sweep = snapshot.sweep
    trials = tuple({trial.number: trial for trial in (*snapshot.trials, *step.changed)}.values())
    folder = uris.run_artifacts(sweep.id, "plots")
    try:
        store.put_bytes(f"{folder}/parallel_coordinates.html", parallel_coordinates_page(sweep.config, trials).encode())
        store.put_bytes(f"{folder}/history.html", history_page(sweep.config, trials).encode())
    except Exception:
        log.exception("sweep %s: its plots could not be stored", sweep.id)
