"""Population-based training (row K3): generations of members; the worst copy weights and hyperparameters of the best.

A generation is a set of trials, each of which trains a part of all steps from the weights of a trial of the generation
before. Pure functions: chance depends on the sweep's seed and on the trial's place alone.
"""

import random
from collections.abc import Sequence

from resources.hpo.search_space import perturbed, sample
from resources.hpo.sweep_config import SweepConfig
from resources.hpo.trial import Suggestion, Trial, ranked

THIRD = 3
"""One in so many is replaced, by one in as many."""


def next_members(config: SweepConfig, trials: Sequence[Trial], limit: int) -> list[Suggestion]:
    """At most `limit` members of the newest generation, or of the next one once that has ended; none when all is done."""
    size = config.population
    newest = max((trial.generation for trial in trials), default=0)
    members = [trial for trial in trials if trial.generation == newest]
    if len(members) == size:
        if newest + 1 == config.generations or not all(trial.has_ended for trial in members):
            return []
        newest, members = newest + 1, []
    before = [trial for trial in trials if trial.generation == newest - 1]
    there = {trial.member for trial in members}
    missing = [member for member in range(size) if member not in there][:limit]
    if newest == 0:
        return [Suggestion(sample(config.search_space, chance_of(config, 0, member)), 0, member) for member in missing]
    best = ranked([trial for trial in before if trial.status == "completed"], config.objective.direction)
    return [descendant(config, newest, member, before, best) for member in missing] if best else []


def descendant(
    config: SweepConfig, generation: int, member: int, before: Sequence[Trial], best: Sequence[Trial]
) -> Suggestion:
    """A member of the next generation: it goes on as it is, or as a changed copy of one of the best.

    Args:
        before: the generation before.
        best: those of it that completed, the best first; at least one.
    """
    own = next(trial for trial in before if trial.member == member)
    cut = max(1, len(before) // THIRD)
    survivors = best[: max(1, len(before) - cut)]
    if own in survivors:
        return Suggestion(own.params, generation, member, own.number)
    chance = chance_of(config, generation, member)
    better = chance.choice(best[:cut])
    return Suggestion(perturbed(config.search_space, better.params, chance), generation, member, better.number)


def chance_of(config: SweepConfig, generation: int, member: int) -> random.Random:
    return random.Random(f"{config.seed}/{generation}/{member}")


def steps_of_a_generation(config: SweepConfig) -> int:
    """All steps shared out to the generations, rounded up."""
    steps = config.base_config["max_steps"]
    assert isinstance(steps, int)
    return -(-steps // config.generations)
