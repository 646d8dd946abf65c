"""What a sweep tries next, by its strategy (rows K3, K5). Pure: the same trials give the same suggestions.

Bayesian search learns from the trials that have ended by then. Of one trial at a time these are always the same; of several
it is a matter of time which they are, and a sweep that is done again may try others. The other strategies try the same.
"""

import random
from collections.abc import Sequence

from resources.hpo.population import next_members
from resources.hpo.search_space import Params, grid_point, sample
from resources.hpo.sweep_config import SweepConfig
from resources.hpo.trial import Suggestion, Trial


def suggestions(config: SweepConfig, trials: Sequence[Trial], limit: int) -> list[Suggestion]:
    """At most `limit` suggestions, for the trials that would be numbered next."""
    if config.strategy == "pbt":
        return next_members(config, trials, limit)
    count = min(limit, config.wanted_trials - len(trials))
    if config.strategy == "bayesian":
        return bayesian(config, trials, count)
    numbers = range(len(trials), len(trials) + count)
    return [Suggestion(by_number(config, number)) for number in numbers]


def by_number(config: SweepConfig, number: int) -> Params:
    """Of a strategy that does not learn: trial `number`, whatever the others are."""
    if config.strategy == "grid":
        return grid_point(config.search_space, number)
    return sample(config.search_space, random.Random(f"{config.seed}/{number}"))


def bayesian(config: SweepConfig, trials: Sequence[Trial], count: int) -> list[Suggestion]:
    if count <= 0:
        return []
    # A second of imports that every process which loads the asset graph would pay for.
    if config.sampler == "gp":
        from resources.hpo.gaussian_process_sampler import suggest
    else:
        from resources.hpo.tpe_sampler import suggest

    known = list(trials)
    for number in range(len(trials), len(trials) + count):
        known.append(Trial(number, "", suggest(config, known), "running", created_at=0))
    return [Suggestion(trial.params) for trial in known[len(trials) :]]
