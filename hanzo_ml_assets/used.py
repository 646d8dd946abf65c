"""What a run has used, told of it as metrics (rows E5, E10, Y2): GPU-hours, dollars, tokens, memory."""

from collections.abc import Mapping

from sqlalchemy import Connection

from hanzo_ml_assets.control_plane import ControlPlane
from recipes.usage import Usage
from resources.metadata.totals import GPU_HOURS_METRIC, GPU_TYPE_TAG
from resources.metadata.tracking.run_data import RunData
from resources.metadata.tracking_rules import metric_point
from resources.run_facts import STEPS_METRIC, TOKENS_METRIC


def tell_used(
    connection: Connection, run_id: str, usage: Usage, gpu_type: str | None, at: int, control_plane: ControlPlane
) -> None:
    """In the caller's transaction. `at` in milliseconds: telling the same again for the same time changes nothing."""
    told = used(usage, gpu_type, control_plane.settings.prices.gpu_hour)
    points = [metric_point(name, value, 0, at) for name, value in told.items()]
    tags = [(GPU_TYPE_TAG, gpu_type)] if usage.gpus and gpu_type else []
    RunData(control_plane.database).log_batch(run_id, metrics=points, tags=tags, connection=connection)


def used(usage: Usage, gpu_type: str | None, prices: Mapping[str, float]) -> dict[str, float]:
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
