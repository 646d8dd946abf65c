"""Bayesian search with Optuna's Tree-structured Parzen Estimator.

The study is rebuilt for each suggestion.

Optuna stores nothing: its storage could not commit together with a trial's job, and a kill between the two would lose a
trial or start it twice. Rebuilding a study of some hundred trials takes milliseconds.
"""

from collections.abc import Sequence

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from resources.hpo.search_space import Choice, Dimension, LogUniform, Params, Space, Value
from resources.hpo.sweep_config import SweepConfig
from resources.hpo.trial import Trial

SEED_STRIDE = 1_000_003


def suggest(config: SweepConfig, trials: Sequence[Trial]) -> Params:
    """Suggest the next params. The result is deterministic.

    Running trials count as bad ones, so that concurrent trials do not all try the same.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    seed = (config.seed * SEED_STRIDE + len(trials)) % 2**32
    study = optuna.create_study(
        direction=config.objective.direction, sampler=optuna.samplers.TPESampler(seed=seed, constant_liar=True)
    )
    space = {name: to_distribution(dimension) for name, dimension in config.search_space.items()}
    study.add_trials([to_frozen_trial(trial, config.search_space, space) for trial in trials])
    suggested = study.ask(space).params
    return {
        name: dimension.values[suggested[name]] if isinstance(dimension, Choice) else suggested[name]
        for name, dimension in config.search_space.items()
    }


def to_frozen_trial(trial: Trial, dimensions: Space, space: dict[str, BaseDistribution]) -> FrozenTrial:
    """Convert a trial to Optuna's type.

    One that was stopped early has the value that it had reached.
    """
    states = {"completed": TrialState.COMPLETE, "pruned": TrialState.PRUNED}
    ended = states.get(trial.status, TrialState.FAIL if trial.has_ended else TrialState.RUNNING)
    reached = {trial.step or 0: trial.value} if ended == TrialState.PRUNED and trial.value is not None else {}
    return create_trial(
        state=ended,
        value=trial.value if ended == TrialState.COMPLETE else None,
        params={name: encode_value(dimensions[name], value) for name, value in trial.params.items()},
        distributions=space,
        intermediate_values=reached,
    )


def encode_value(dimension: Dimension, value: Value) -> Value:
    """Return a choice's position instead of its value: Optuna does not support lists."""
    return dimension.values.index(value) if isinstance(dimension, Choice) else value


def to_distribution(dimension: Dimension) -> BaseDistribution:
    if isinstance(dimension, Choice):
        return CategoricalDistribution(range(len(dimension.values)))
    return FloatDistribution(dimension.min, dimension.max, log=isinstance(dimension, LogUniform))
