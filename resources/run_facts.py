"""What a run says of the model that it made (specification row O1): its parameters, and what it measured. Pure."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from recipes.fit import METHODS
from resources.metadata.totals import GPU_HOURS_METRIC
from resources.metadata.tracking.logged_runs import LoggedRun

CONFIG = ("dataset", "method", "recipe")
STEPS_METRIC = "system/total_steps"
TOKENS_METRIC = "system/total_tokens_processed"
NUMBERS = {"dataset_version": int, "learning_rate": float, "lora_rank": int, "max_steps": int, "total_steps": int}
OF_THE_MACHINE = "system/"
"""Begins the metrics that say what a run used, and nothing of its model."""


@dataclass(frozen=True)
class RunFacts:
    """What a run does not say is left out, or empty."""

    base_model: str
    method: str
    metrics: Mapping[str, float]
    training_config: Mapping[str, object]


def facts_of(logged: LoggedRun) -> RunFacts:
    params = logged.params
    measured = {point.key: point.value for point in logged.metrics if not point.is_nan}
    config: dict[str, object] = {key: params[key] for key in CONFIG if key in params}
    config |= {key: number_or_text(convert, params[key]) for key, convert in NUMBERS.items() if key in params}
    if "max_steps" in config:
        config = {"total_steps": config.pop("max_steps"), **config}
    if STEPS_METRIC in measured:  # training may end before the steps that it was given
        config["total_steps"] = int(measured[STEPS_METRIC])
    if GPU_HOURS_METRIC in measured:
        config["gpu_hours"] = measured[GPU_HOURS_METRIC]
    return RunFacts(
        base_model=params.get("base_model") or params.get("model", ""),
        method=method if (method := params.get("method", "")) in METHODS else "",
        metrics={key: value for key, value in measured.items() if not key.startswith(OF_THE_MACHINE)},
        training_config=config,
    )


def number_or_text(convert: Callable[[str], float], value: str) -> float | str:
    """A run that is no job's may call its dataset version "v7". JSON has no NaN and no infinity: they are text."""
    try:
        number = convert(value)
    except ValueError:
        return value
    return value if isinstance(number, float) and not math.isfinite(number) else number
