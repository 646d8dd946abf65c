"""What a run does about memory that ran out and about a loss that diverged: written down first, then started again."""

from collections.abc import Sequence
from pathlib import Path

from recipes.checkpoints import Checkpoints
from recipes.divergence import Divergence
from recipes.incidents import (
    MOST,
    Diverged,
    Incidents,
    OutOfMemory,
    put_incidents,
    read_incidents,
    write_incident,
)
from recipes.recipe import Recipe
from recipes.runner import Restart, say
from recipes.schema import MEMORY_RAN_OUT, BadConfiguration
from recipes.store import Store
from recipes.training.out_of_memory import smaller
from recipes.training.samples import SamplesOfRun


def restart_smaller(store: Store, uri: str, recipe: Recipe, step: int) -> Restart:
    """The restart after `step` did not fit into memory with the micro-batch of `recipe`. `uri` is of the run's checkpoints.

    Raises:
        BadConfiguration: there is nothing smaller to start again with.
    """
    incident = smaller(recipe, read_incidents(store, uri), step)
    write_incident(store, uri, incident)
    return Restart(incident.words)


def what_happened(
    store: Store, uri: str, recipe: Recipe, work: Path, *, done: int, repeats: Sequence[OutOfMemory]
) -> Incidents:
    """The incidents of a run that goes on after step `done`, with one more where the kernel has just ended it for want of
    memory, and with those of the run that it repeats that came so early.

    Another program may have taken that memory: where there is no smaller micro-batch, the run goes on as it was.
    """
    known, told = read_incidents(store, uri), work / MEMORY_RAN_OUT
    if told.exists():
        try:
            incident = smaller(known.fitted(recipe), known, None)
        except BadConfiguration as problem:
            say(f"the kernel ended the program for want of memory: {problem}")
        else:
            known = write_incident(store, uri, incident)
            say(f"the kernel ended the program: {incident.words}")
        told.unlink()
    for incident in repeats:
        if incident.after is not None and incident.after <= done:
            known = write_incident(store, uri, incident)
    settled = known.going_on(done)
    if settled != known:
        put_incidents(store, uri, settled)
    return settled


def roll_back(
    store: Store, uri: str, recipe: Recipe, checkpoints: Checkpoints, samples: SamplesOfRun, found: Divergence
) -> tuple[int, Path] | None:
    """The last checkpoint from before a divergence, which is the newest from now on; None where there is none.

    The update before the first bad loss is what made the weights bad, so its checkpoint goes too. They go before the
    incident is written: a program that is killed in between comes here again by the same steps.

    Raises:
        Restart: the recipe allows to go on without the samples of the bad steps.
    """
    first = max(1, found.first - 1)
    checkpoints.discard_from(first)
    good = checkpoints.latest()
    healed = [entry for entry in read_incidents(store, uri).diverged if entry.skipped]
    goes_on = recipe.divergence.action == "skip" and len(healed) < MOST
    incident = Diverged(
        step=found.first,
        noticed=found.noticed,
        reason=found.reason,
        rolled_back_to=good[0] if good else None,
        skipped=samples.positions_of_steps(first, found.noticed) if goes_on else None,
    )
    write_incident(store, uri, incident)
    if goes_on:
        raise Restart(incident.words)
    say(incident.words)
    return good
