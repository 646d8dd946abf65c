"""Suggest the next trials according to the strategy, including population-based training."""

import random
from collections.abc import Sequence

from resources.hpo.search_space import Params, grid_point, perturb_params, sample_params
from resources.hpo.sweep_config import SweepConfig
from resources.hpo.trial import Suggestion, Trial, rank_trials

# Population-based training: generations of members; the worst copy weights and hyperparameters of the best.
#
# A generation is a set of trials. Each trains a part of all steps, from the weights of a trial of the previous generation.
# Pure functions: randomness depends only on the sweep's seed and the trial's place.

REPLACEMENT_DIVISOR = 3
"""One in this many members is replaced, by one of the same number of best members."""


def next_members(config: SweepConfig, trials: Sequence[Trial], limit: int) -> list[Suggestion]:
    """Return up to `limit` members to start next.

    They are of the newest generation, or of the next one once that has ended. Empty after the last generation.
    """
    size = config.population
    newest = max((trial.generation for trial in trials), default=0)
    members = [trial for trial in trials if trial.generation == newest]
    if len(members) == size:
        if newest + 1 == config.generations or not all(trial.has_ended for trial in members):
            return []
        newest, members = newest + 1, []
    before = [trial for trial in trials if trial.generation == newest - 1]
    existing = {trial.member for trial in members}
    missing = [member for member in range(size) if member not in existing][:limit]
    if newest == 0:
        return [
            Suggestion(sample_params(config.search_space, member_rng(config, 0, member)), 0, member) for member in missing
        ]
    best = rank_trials([trial for trial in before if trial.status == "completed"], config.objective.direction)
    return [evolve_member(config, newest, member, before, best) for member in missing] if best else []


def evolve_member(
    config: SweepConfig, generation: int, member: int, before: Sequence[Trial], best: Sequence[Trial]
) -> Suggestion:
    """Return a member of the next generation.

    It continues unchanged, or as a perturbed copy of one of the best.

    Args:
        before: the previous generation.
        best: its completed members, best first; at least one.
    """
    own = next(trial for trial in before if trial.member == member)
    cut = max(1, len(before) // REPLACEMENT_DIVISOR)
    survivors = best[: max(1, len(before) - cut)]
    if own in survivors:
        return Suggestion(own.params, generation, member, own.number)
    rng = member_rng(config, generation, member)
    better = rng.choice(best[:cut])
    return Suggestion(perturb_params(config.search_space, better.params, rng), generation, member, better.number)


def member_rng(config: SweepConfig, generation: int, member: int) -> random.Random:
    return random.Random(f"{config.seed}/{generation}/{member}")


def generation_steps(config: SweepConfig) -> int:
    """Return the steps of each generation, rounded up."""
    steps = config.base_config["max_steps"]
    assert isinstance(steps, int)
    return -(-steps // config.generations)


# The next trials of a sweep, according to its strategy. Pure functions: the same trials give the same suggestions.
#
# Bayesian search learns from the trials that have ended. With concurrent trials, which these are depends on timing, so a
# repeated sweep may try other params. With one trial at a time, and with the other strategies, it tries the same.


def suggest_trials(config: SweepConfig, trials: Sequence[Trial], limit: int) -> list[Suggestion]:
    """Return up to `limit` suggestions, for the trials with the next numbers."""
    if config.strategy == "pbt":
        return next_members(config, trials, limit)
    count = min(limit, config.wanted_trials - len(trials))
    if config.strategy == "bayesian":
        return suggest_bayesian(config, trials, count)
    numbers = range(len(trials), len(trials) + count)
    return [Suggestion(suggest_by_number(config, number)) for number in numbers]


def suggest_by_number(config: SweepConfig, number: int) -> Params:
    """Return the params of trial `number`, for strategies that do not learn."""
    if config.strategy == "grid":
        return grid_point(config.search_space, number)
    return sample_params(config.search_space, random.Random(f"{config.seed}/{number}"))


def suggest_bayesian(config: SweepConfig, trials: Sequence[Trial], count: int) -> list[Suggestion]:
    if count <= 0:
        return []
    # Imported late: it takes a second, which each process that loads the asset graph would have to wait.
    if config.sampler == "gp":
        from resources.hpo.gaussian_process_sampler import suggest
    else:
        from resources.hpo.tpe_sampler import suggest

    all_trials = list(trials)
    for number in range(len(trials), len(trials) + count):
        all_trials.append(Trial(number, "", suggest(config, all_trials), "running", created_at=0))
    return [Suggestion(trial.params) for trial in all_trials[len(trials) :]]
