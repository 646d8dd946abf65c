"""Complete a run's record: usage, machine, and metrics that were not sent or were lost."""

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

# The machine of a run, recorded as tags: processor, GPUs, package versions.


def machine_tags(machine: Machine | None) -> list[tuple[str, str]]:
    """Return the tags that describe a machine; none if it is unknown."""
    if machine is None:
        return []
    gpus = {"gpus": ", ".join(machine.gpus)} if machine.gpus else {}
    tags = {"python": machine.python, "processor": machine.processor, **gpus, **machine.packages}
    return [(f"environment/{key}", value) for key, value in tags.items()]


# The usage of a run, recorded as metrics: GPU-hours, dollars, tokens, memory.


def record_usage(
    connection: Connection, run_id: str, usage: Usage, gpu_type: str | None, at: int, control_plane: ControlPlane
) -> None:
    """Log usage in the caller's transaction, idempotently for equal `at` (milliseconds)."""
    metrics = usage_metrics(usage, gpu_type, control_plane.settings.prices.gpu_hour)
    points = [metric_point(name, value, 0, at) for name, value in metrics.items()]
    tags = [(GPU_TYPE_TAG, gpu_type)] if usage.gpus and gpu_type else []
    RunData(control_plane.database).log_batch(run_id, metrics=points, tags=tags, connection=connection)


def usage_metrics(usage: Usage, gpu_type: str | None, prices: Mapping[str, float]) -> dict[str, float]:
    """Return usage as metrics by name. `prices` are dollars per hour by GPU type.

    Without a price there is no dollar metric. A command without steps has no token and memory metrics.
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


# Metrics that a training program measured while its tracking server was down, logged once the program has ended.

METRICS_PER_BATCH = 1000
"""MLflow's limit of metrics per request."""
POINTS_PER_PAGE = 25_000
"""MLflow's limit of points per page of a history."""


def log_unsent_metrics(run_id: str, folder: str, control_plane: ControlPlane) -> None:
    """Log the metrics left in `folder`, each step once. Raises FileNotFoundError if there are none.

    A step repeated after a kill may already be logged, with another time. If it was repeated with a different result, its
    first values don't count.
    """
    data, logged = RunData(control_plane.database), Metrics(control_plane.database)
    unsent = [point for point in read_unsent_metrics(control_plane.store, folder) if is_valid(point)]
    there = {key: read_newest_times(logged, run_id, key) for key in {point.key for point in unsent}}
    missing = (point for point in unsent if is_missing(point, there[point.key].get(point.step)))
    points = (metric_point(point.key, point.value, point.step, point.timestamp) for point in missing)
    while batch := list(islice(points, METRICS_PER_BATCH)):
        data.log_batch(run_id, metrics=batch)


def is_missing(unsent: UnsentPoint, newest: int | None) -> bool:
    """Whether the run lacks a point; `newest` is its step's last logged time (ms)."""
    return newest is None or (unsent.anew and (unsent.since is None or newest <= unsent.since))


def read_newest_times(logged: Metrics, run_id: str, key: str) -> dict[int, int]:
    """Return the time (ms since 1970) of the newest value per step."""
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
    """Whether the server would accept the point; invalid ones are dropped when sent, too."""
    try:
        metric_point(unsent.key, unsent.value, unsent.step, unsent.timestamp)
    except HanzoError:
        return False
    return True


# Losses that the tracker lacks because its database was restored to a state before they were logged.
#
# The run's result contains them. Other metrics logged since then exist nowhere else and are lost.

LOSS_METRIC = "train/loss"


def log_lost_losses(run_id: str, losses: Mapping[int, float | None], control_plane: ControlPlane) -> None:
    """Log the losses of steps that have none, with the current time.

    The result stores a loss that was not finite as null, so those cannot be restored.
    """
    data, known = RunData(control_plane.database), read_newest_times(Metrics(control_plane.database), run_id, LOSS_METRIC)
    now = now_ms()
    lost = ((step, loss) for step, loss in sorted(losses.items()) if loss is not None and step not in known)
    points = (metric_point(LOSS_METRIC, loss, step, now) for step, loss in lost)
    while batch := list(islice(points, METRICS_PER_BATCH)):
        data.log_batch(run_id, metrics=batch)
