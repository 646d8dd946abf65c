"""Validate a sweep request beyond its form. Pure functions.

This happens only at submission, and not in the type: a stricter rule must not make existing sweeps unreadable.
"""

import math
from collections.abc import Iterator, Sequence

from recipes.contracts.quantities import pluralize
from recipes.contracts.recipe import Recipe
from recipes.contracts.recipe_references import BUILT_IN_OBJECTIVES, PREFERENCE_OBJECTIVES, list_installed_objectives
from resources.errors import HanzoError, invalid
from resources.hpo.search_space import Choice, Dimension, Value
from resources.hpo.sweep_config import SweepConfig
from resources.hpo.trial_job import NAME_KEYS
from resources.metadata.field_rules import check_key

MAX_DIMENSIONS = 100
MAX_VALUES = 1000
"""Maximum number of values of a choice; a range may have as many points."""
MAX_AXES = 1000
"""Maximum number of axes for the Gaussian process, which compares a thousand candidates with hundreds of trials on each."""
STRATEGY_KEYS = {"sampler": "bayesian", "pbt": "pbt", "successive_halving": "successive_halving"}
"""Keys of a sweep that only one strategy uses."""
STEP_PREFIX, EVALUATION_PREFIX = "train/", "eval/"
"""Prefixes of the metrics that training logs at steps and evaluations; no objective logs others."""
PREFERENCE_METRICS = ("eval/reward_accuracy", "eval/reward_margin", "eval/reward_chosen", "eval/reward_rejected")
TEXT_METRICS = ("eval/perplexity",)
EVALUATION_METRICS = ("eval/loss", *TEXT_METRICS, *PREFERENCE_METRICS)
"""All evaluation metrics of the built-in objectives (`recipes.training.metrics.tracking`)."""


def check_sweep(config: SweepConfig) -> None:
    """Check a sweep. Raises HanzoError, with a message that names the problem."""
    for key in NAME_KEYS:
        given = config.base_config.get(key)
        if given is not None and not (isinstance(given, str) and given):
            raise invalid(f"base_config.{key} must be a name: write it as a text, or leave it out")
    check_duplicate_keys(config)
    for key, strategy in STRATEGY_KEYS.items():
        # A sweep that was read from the server and is submitted again has all keys, with their default values.
        says_more = getattr(config, key) != SweepConfig.model_fields[key].default
        if says_more and config.strategy != strategy:
            raise invalid(f"{key} is only used by strategy {strategy}, and this one is {config.strategy}: remove it")
    if len(config.search_space) > MAX_DIMENSIONS:
        raise invalid(f"search_space has {len(config.search_space)} hyperparameters: search {MAX_DIMENSIONS} at most")
    for name, dimension in config.search_space.items():
        if isinstance(dimension, Choice) and len(dimension.values) > MAX_VALUES:
            raise invalid(
                f"search_space.{name[:100]} has {len(dimension.values)} values: give {MAX_VALUES} at most, or a range"
            )
        # A grid would train it twice, with the same result: 1, 1.0 and true compare equal.
        if isinstance(dimension, Choice) and (duplicates := list(repeated_values(dimension.values))):
            raise invalid(f"search_space.{name[:100]} has the value {duplicates[0]} twice: leave one of them out")
        if not isinstance(dimension, Choice) and not math.isfinite(dimension.max - dimension.min):
            raise invalid(f"search_space.{name[:100]} is wider than any number: give a narrower range, or a log_uniform")
    if config.strategy == "pbt":
        check_population(config)
    if config.strategy == "bayesian" and config.sampler == "gp":
        axes = sum(count_axes(dimension) for dimension in config.search_space.values())
        if axes > MAX_AXES:
            raise invalid(
                f"sampler gp has an axis for each value of a choice, here {axes}: give {MAX_AXES} at most, or use tpe"
            )
    # No trial could log it, which would only be noticed after all of them had been trained.
    check_key(config.objective.metric, "objective.metric", "objective.metric")
    if is_unknown_metric(config.objective.metric) and not (
        is_evaluation_metric(config.objective.metric) and list_installed_objectives()
    ):
        raise unlogged_metric_error(config.objective.metric)


def check_duplicate_keys(config: SweepConfig) -> None:
    """Check that each recipe key is given only once.

    Otherwise it is not obvious which one applies.

    Raises:
        HanzoError: a key is given twice.
    """
    base = config.base_config
    nested = given if isinstance(given := base.get("parameters"), dict) else {}
    places = {"base_config": base.keys(), "search_space": config.search_space.keys()}
    if config.resources_per_trial and "hardware" in base.keys() | nested.keys():
        raise invalid("hardware is in base_config and in resources_per_trial: remove one of them")
    for place, keys in places.items():
        if duplicates := sorted(nested.keys() & keys):
            raise invalid(f"{duplicates[0]} is in base_config.parameters and in {place}: remove one of them")


def repeated_values(values: Sequence[Value]) -> Iterator[Value]:
    """Yield the values that equal an earlier one."""
    seen_values: set[object] = set()
    for value in values:
        known = tuple(value) if isinstance(value, list) else value
        if known in seen_values:
            yield value
        seen_values.add(known)


def check_population(config: SweepConfig) -> None:
    """Refuse a population that cannot copy, or that would train longer than requested. Raises HanzoError."""
    if config.population == 1:
        raise invalid("strategy pbt has only one member, which cannot copy from another: set pbt.population to at least 2")
    steps = config.base_config["max_steps"]
    if isinstance(steps, int) and config.generations > steps:
        raise invalid(
            f"strategy pbt has {config.generations} generations, which share base_config.max_steps, and that is {steps}: "
            "give pbt.generations, no more than steps"
        )


def count_axes(dimension: Dimension) -> int:
    return len(dimension.values) if isinstance(dimension, Choice) else 1


def check_recipe(config: SweepConfig, recipe: Recipe) -> None:
    """Refuse a sweep whose objective or first cut no trial of this recipe reaches.

    Raises HanzoError.
    """
    if is_evaluation_metric(config.objective.metric) and recipe.eval_steps is None:
        raise invalid(
            f"objective '{config.objective.metric}' is never logged, because recipe '{recipe.name}' does not evaluate: give "
            "base_config.eval_steps, the steps between two evaluations"
        )
    known = recipe.objective in BUILT_IN_OBJECTIVES  # custom objectives log metrics with other names
    if known and is_unknown_metric(config.objective.metric):
        raise unlogged_metric_error(config.objective.metric)
    if known and config.objective.metric in unlogged_metrics(recipe):
        raise invalid(
            f"objective '{config.objective.metric}' is never logged, because recipe '{recipe.name}' has the objective "
            f"{recipe.objective}: choose one of "
            f"{', '.join(key for key in EVALUATION_METRICS if key not in unlogged_metrics(recipe))}"
        )
    if config.strategy == "successive_halving" and config.first_rung >= recipe.max_steps:
        raise invalid(
            f"strategy successive_halving cuts first at step {config.first_rung}, and a trial has "
            f"{pluralize(recipe.max_steps, 'step')}: give successive_halving.min_steps, less than max_steps"
        )


def is_unknown_metric(metric: str) -> bool:
    """Return whether none of the built-in objectives logs this metric."""
    return not metric.startswith(STEP_PREFIX) and metric not in EVALUATION_METRICS


def is_evaluation_metric(metric: str) -> bool:
    return metric.startswith(EVALUATION_PREFIX)


def unlogged_metric_error(metric: str) -> HanzoError:
    return invalid(f"objective.metric: no training logs '{metric}': choose one of {', '.join(EVALUATION_METRICS)}")


def unlogged_metrics(recipe: Recipe) -> Sequence[str]:
    """Return the evaluation metrics that a recipe's objective does not log.

    A custom objective's are unknown.
    """
    return TEXT_METRICS if recipe.objective in PREFERENCE_OBJECTIVES else PREFERENCE_METRICS
