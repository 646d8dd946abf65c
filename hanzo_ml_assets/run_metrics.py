"""Complete a run's record: usage, machine, and metrics that were unsent or lost."""

from collections.abc import Mapping
from itertools import islice

from sqlalchemy import Connection

from hanzo_ml_assets.control_plane import ControlPlane
from recipes.contracts.job import Machine
from recipes.contracts.results import UnsentPoint, Usage, read_unsent_metrics
from resources.errors import HanzoError
from resources.metadata.field_rules import metric_point
from resources.metadata.outbox import now_ms
from resources.metadata.tracking.metrics import Metrics
from resources.metadata.tracking.run_data import RunData
from resources.monitoring.usage_totals import GPU_HOURS_METRIC, GPU_TYPE_TAG
from resources.registration.model_facts import STEPS_METRIC, TOKENS_METRIC

# On what a run ran, told of it as tags (row E8): processor, GPUs, versions.


def machine_tags(machine: Machine | None) -> list[tuple[str, str]]:
    """Nothing of a machine that did not say what it is."""
    if machine is None:
        return []
    gpus = {"gpus": ", ".join(machine.gpus)} if machine.gpus else {}
    tags = {"python": machine.python, "processor": machine.processor, **gpus, **machine.packages}
    return [(f"environment/{key}", value) for key, value in tags.items()]


# What a run has used, told of it as metrics (rows E5, E10, Y2): GPU-hours, dollars, tokens, memory.


def record_usage(
    connection: Connection, run_id: str, usage: Usage, gpu_type: str | None, at: int, control_plane: ControlPlane
) -> None:
    """In the caller's transaction. `at` in milliseconds: telling the same again for the same time changes nothing."""
    metrics = usage_metrics(usage, gpu_type, control_plane.settings.prices.gpu_hour)
    points = [metric_point(name, value, 0, at) for name, value in metrics.items()]
    tags = [(GPU_TYPE_TAG, gpu_type)] if usage.gpus and gpu_type else []
    RunData(control_plane.database).log_batch(run_id, metrics=points, tags=tags, connection=connection)


def usage_metrics(usage: Usage, gpu_type: str | None, prices: Mapping[str, float]) -> dict[str, float]:
    """By the name of the metric. `prices` are dollars an hour by type of GPU; without one nothing is said of dollars.

    What a command counts is its own: of tokens and memory nothing is said where no step was counted.
    """
    price = prices.get(gpu_type or "") if usage.gpus else 0.0
    trained = {
        STEPS_METRIC: float(usage.steps),
        "system/peak_memory_gb": usage.peak_memory / 1e9,
        TOKENS_METRIC: float(usage.tokens),
        "system/checkpoint_share": round(usage.checkpoint_share, 4),
    }
    return {
        "system/gpu_count": float(usage.gpus),
        GPU_HOURS_METRIC: usage.gpu_hours,
        **(trained if usage.steps else {}),
        **({"system/dollars": usage.gpu_hours * price} if price is not None else {}),
    }


# What a training program measured while its tracking server was away, on its run once the program has ended.

METRICS_PER_BATCH = 1000
"""MLflow's limit of metrics in one request."""
POINTS_PER_PAGE = 25_000
"""Its limit of points in one page of a history."""


def log_unsent_metrics(run_id: str, folder: str, control_plane: ControlPlane) -> None:
    """Log what was left in `folder`, each step once: one that the run did again after a kill, and could not ask for, may be
    there, at another time. Of a step that it did otherwise than the first time, values of that do not count.

    Raises FileNotFoundError where nothing was left.
    """
    data, logged = RunData(control_plane.database), Metrics(control_plane.database)
    unsent = [point for point in read_unsent_metrics(control_plane.store, folder) if is_valid(point)]
    there = {key: read_newest_times(logged, run_id, key) for key in {point.key for point in unsent}}
    missing = (point for point in unsent if is_missing(point, there[point.key].get(point.step)))
    points = (metric_point(point.key, point.value, point.step, point.timestamp) for point in missing)
    while batch := list(islice(points, METRICS_PER_BATCH)):
        data.log_batch(run_id, metrics=batch)


def is_missing(unsent: UnsentPoint, newest: int | None) -> bool:
    """Whether the run has not got it: the `newest` value of its step (ms since 1970), if any, is of the first time."""
    return newest is None or (unsent.anew and (unsent.since is None or newest <= unsent.since))


def read_newest_times(logged: Metrics, run_id: str, key: str) -> dict[int, int]:
    """When (ms since 1970) the newest value of that key at each step is from."""
    found: dict[int, int] = {}
    token = None
    while True:
        page = logged.history(run_id, key, POINTS_PER_PAGE, token)
        for point in page.points:
            found[point.step] = max(point.timestamp, found.get(point.step, point.timestamp))
        token = page.next_page_token
        if token is None:
            return found


def is_valid(unsent: UnsentPoint) -> bool:
    """False for what the server would have refused: that is dropped where it is sent, too."""
    try:
        metric_point(unsent.key, unsent.value, unsent.step, unsent.timestamp)
    except HanzoError:
        return False
    return True


# Losses of a run that the tracker does not know any more: of a database that was put back to a day before they were
# logged.
#
# The run's result has them. What else was logged since is in no other place, and is gone.

LOSS_METRIC = "train/loss"


def log_lost_losses(run_id: str, losses: Mapping[int, float | None], control_plane: ControlPlane) -> None:
    """Log the losses of those steps that have none, at the time of now; whatever a step has stays as it is. Of one that was
    no finite number the result does not say which it was: it is not told.
    """
    data, known = RunData(control_plane.database), read_newest_times(Metrics(control_plane.database), run_id, LOSS_METRIC)
    now = now_ms()
    lost = ((step, loss) for step, loss in sorted(losses.items()) if loss is not None and step not in known)
    points = (metric_point(LOSS_METRIC, loss, step, now) for step, loss in lost)
    while batch := list(islice(points, METRICS_PER_BATCH)):
        data.log_batch(run_id, metrics=batch)
