"""What a run does about memory that ran out, a loss that diverged, an operation that has no form which computes the same
each time, and a block that cannot be compiled: written down first, then started again.
"""

import time
from collections.abc import Sequence
from pathlib import Path

from recipes.checkpoints.manager import Checkpoints
from recipes.contracts.divergence import Divergence, spoilt_from
from recipes.contracts.job import MEMORY_RAN_OUT, BadConfiguration
from recipes.contracts.recipe import Recipe
from recipes.contracts.recovery_log import (
    MOST,
    Diverged,
    Incident,
    Incidents,
    NotCompiled,
    NotDeterministic,
    put_incidents,
    read_incidents,
    write_incident,
)
from recipes.platform_errors import is_out_of_memory
from recipes.runner import Restart, say
from recipes.storage.artifact_store import Store
from recipes.training.compilation import failed_to_compile
from recipes.training.data.sample_order import SamplesOfRun
from recipes.training.determinism import refused_operation
from recipes.training.discarding import first_discarded
from recipes.training.out_of_memory import smaller


def restart_after(
    error: Exception, incidents: Incidents, store: Store, uri: str, recipe: Recipe, step: int
) -> Restart | None:
    """The restart that is the remedy for what went wrong in `step`; None where we know of none. `uri` is of the checkpoints.

    Raises:
        BadConfiguration: memory ran out, and there is nothing smaller to start again with.
    """
    if is_out_of_memory(error):  # also of a compiler, which tries a kernel
        return restart_smaller(store, uri, recipe, step)
    incident: NotDeterministic | NotCompiled
    if not incidents.not_deterministic and (operation := refused_operation(error)):
        incident = NotDeterministic(step=step, operation=operation)
    elif not incidents.not_compiled and (reason := failed_to_compile(error)):
        incident = NotCompiled(step=step, reason=reason)
    else:
        return None
    write_incident(store, uri, incident)
    return Restart(incident.words)


def restart_smaller(store: Store, uri: str, recipe: Recipe, step: int) -> Restart:
    """The restart after `step` did not fit into memory with the micro-batch of `recipe`. `uri` is of the run's checkpoints.

    Raises:
        BadConfiguration: there is nothing smaller to start again with.
    """
    incident = smaller(recipe, read_incidents(store, uri), step)
    write_incident(store, uri, incident)
    return Restart(incident.words)


def what_happened(
    known: Incidents, store: Store, uri: str, recipe: Recipe, work: Path, *, done: int, repeats: Sequence[Incident]
) -> Incidents:
    """The incidents of a run that goes on after step `done`: those `known`, with one more where the kernel has just ended it
    for want of memory, and with those of the run that it repeats that hold by then.

    Another program may have taken that memory: where there is no smaller micro-batch, the run goes on as it was.
    """
    told = work / MEMORY_RAN_OUT
    found = known.repeating(repeats, done)
    if told.exists():
        try:
            incident = smaller(found.fitted(recipe), found, None)
        except BadConfiguration as problem:
            say(f"the kernel ended the program for want of memory: {problem}")
        else:
            found = found.grown(incident)
            say(f"the kernel ended the program: {incident.words}")
    found = found.going_on(done)
    if found != known:
        put_incidents(store, uri, found)
    told.unlink(missing_ok=True)
    return found


def roll_back(
    store: Store,
    uri: str,
    recipe: Recipe,
    checkpoints: Checkpoints,
    samples: SamplesOfRun,
    found: Divergence,
    repeats: Sequence[Incident],
) -> tuple[int, Path] | None:
    """The last checkpoint from before a divergence, which is the newest from now on; None where there is none.

    They go before the incident is written: a program that is killed in between comes here again by the same steps. A run
    that was sent back, and has no good checkpoint on its way, goes back to where it was sent; where that is spoilt already
    it would come to the same again, and ends.

    Raises:
        Restart: the recipe allows to go on without the samples of the bad steps; or the last good one lies in parts on
            several machines, which bring it as the run goes on.
    """
    first = spoilt_from(found.first)
    checkpoints.discard_from(first_discarded(found, repeats))
    checkpoints.close_parts()
    begins = checkpoints.latest() or checkpoints.came_from()
    good = begins if begins and begins[0] < first else None
    healed = [entry for entry in read_incidents(store, uri).diverged if entry.skipped]
    goes_on = recipe.divergence.action == "skip" and len(healed) < MOST and begins == good
    incident = Diverged(
        step=found.first,
        noticed=found.noticed,
        reason=found.reason,
        way=checkpoints.uri.removeprefix(uri).strip("/") or ".",
        rolled_back_to=good[0] if good else None,
        skipped=samples.positions_of_steps(first, found.noticed) if goes_on else None,
        at=time.time_ns() // 1_000_000 if goes_on else None,
    )
    write_incident(store, uri, incident)
    if goes_on:
        raise Restart(incident.words)
    say(incident.words)
    return good
