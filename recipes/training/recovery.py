"""Recover from out-of-memory errors, divergence, nondeterministic kernels and compile failures."""

import shutil
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from recipes.checkpoints.local import clean_interrupted_writes, list_branches, list_local_steps, remove_steps_from
from recipes.checkpoints.manager import CheckpointManager
from recipes.contracts.divergence import first_corrupt_step
from recipes.contracts.job import OUT_OF_MEMORY_FILE, BadConfiguration
from recipes.contracts.recipe import Recipe
from recipes.contracts.recovery_log import (
    MAX_PER_KIND,
    Diverged,
    NotCompiled,
    NotDeterministic,
    OutOfMemory,
    RecoveryEvent,
    RecoveryLog,
    add_recovery_event,
    describe_step,
    find_final_divergences,
    read_recovery_log,
    write_recovery_log,
)
from recipes.platform_errors import is_out_of_memory
from recipes.runner import Restart, log_line
from recipes.storage.artifact_store import MANIFEST_FILE, Store
from recipes.storage.manifest import Manifest
from recipes.training.compilation import compile_failure_reason
from recipes.training.data.sample_order import RunSamples
from recipes.training.determinism import nondeterministic_operation
from recipes.training.divergence import Divergence

# The next smaller micro-batch of the same effective batch, after a step ran out of memory.


def halve_micro_batch(recipe: Recipe, incidents: RecoveryLog, step: int | None) -> OutOfMemory:
    """What to go on with after `step` did not fit with `recipe`: half the micro-batch, twice the accumulation.

    No `step`: nobody knows which. Where half is no whole divisor of the effective batch, the next smaller one that is.

    Raises:
        BadConfiguration: there is no smaller micro-batch, or it was made smaller often enough.
    """
    problem = f"{describe_step(step)} does not fit into memory with batch_size {recipe.batch_size}"
    advice = "give a shorter sequence_length, gradient_checkpointing: true, method qlora, or hardware with more memory"
    if recipe.batch_size == 1:
        raise BadConfiguration(f"{problem}, and there is no smaller one: {advice}")
    half = recipe.with_max_batch_size(recipe.batch_size // 2)
    found = OutOfMemory(step=step, batch_size=half.batch_size, gradient_accumulation=half.gradient_accumulation)
    # Another process of the run, which has the same step on another GPU, may have written it down a moment ago.
    if len(incidents.out_of_memory) >= MAX_PER_KIND and found not in incidents.entries:
        raise BadConfiguration(f"{problem}, after it was made smaller {MAX_PER_KIND} times: {advice}")
    return found


# What a run does not go on from after it diverged, on whichever machine it lies.
#
# Checkpoints from the first discarded step on are removed on every machine.

DIVERGENCES_FACT = "divergences"
"""The fact in a checkpoint's manifest: how many divergences of its run had been written down as it was saved."""


def first_discarded_step(found: Divergence, repeats: Sequence[RecoveryEvent]) -> int:
    """The step from which on a run does not go on after a divergence.

    Checkpoints are saved by the clock too: a run that `repeats` this divergence goes back to the same step, not to a newer
    one of its own.
    """
    earlier_steps = [
        entry.rolled_back_to or 0 for entry in find_final_divergences(repeats) if entry.noticed == found.noticed
    ]
    return min([first_corrupt_step(found.first), *(step + 1 for step in earlier_steps)])


def discard_local_checkpoints(checkpoints: CheckpointManager, found: Divergence, repeats: Sequence[RecoveryEvent]) -> None:
    """Remove what a machine has, beside the leader's, of what is not gone on from after a divergence.

    Before the leader rolls back: where the machines have changed places by the next start, this one says where to go on, and
    had fetched a whole checkpoint that is spoilt.
    """
    remove_steps_from(checkpoints.folder, first_discarded_step(found, repeats))


def discard_diverged_checkpoints(folder: Path, diverged: Sequence[Diverged]) -> None:
    """Remove what was saved before the run `diverged`, and was spoilt by then, from the folder of a machine.

    One that was away at that time still has it. Where the others have no newer one, it said where to go on; and the run went
    on from what it had been healed of, with that written in its record.
    """
    for way in list_branches(folder) if diverged else ():
        clean_interrupted_writes(way)
        name = way.relative_to(folder).as_posix()
        for step in list_local_steps(way):
            if is_diverged(step, name, divergences_since(way / str(step), diverged)):
                log_line(f"checkpoint {step} is of what the run was healed of while this machine was away: not gone on from")
                shutil.rmtree(way / str(step))


def is_diverged(step: int, way: str, later_divergences: Iterable[Diverged]) -> bool:
    """Whether a checkpoint of that way is, by what has happened since it was saved."""
    return any(entry.way == way and step >= first_corrupt_step(entry.step) for entry in later_divergences)


def divergences_since(checkpoint: Path, diverged: Sequence[Diverged]) -> Sequence[Diverged]:
    """Those that had not happened yet as it was saved; none where it does not say, as those of earlier versions."""
    with suppress(FileNotFoundError, ValidationError):
        known = Manifest.model_validate_json((checkpoint / MANIFEST_FILE).read_bytes()).facts.get(DIVERGENCES_FACT)
        return diverged[known:] if isinstance(known, int) else ()
    return ()


# What a run does about memory that ran out, a loss that diverged, an operation that has no form which computes the same
# each time, and a block that cannot be compiled: written down first, then started again.


def recover_from_error(
    error: Exception, incidents: RecoveryLog, store: Store, uri: str, recipe: Recipe, step: int
) -> Restart | None:
    """The restart that is the remedy for what went wrong in `step`; None where we know of none. `uri` is of the checkpoints.

    Raises:
        BadConfiguration: memory ran out, and there is nothing smaller to start again with.
    """
    if is_out_of_memory(error):  # also of a compiler, which tries a kernel
        return restart_with_smaller_batch(store, uri, recipe, step)
    incident: NotDeterministic | NotCompiled
    if not incidents.not_deterministic and (operation := nondeterministic_operation(error)):
        incident = NotDeterministic(step=step, operation=operation)
    elif not incidents.not_compiled and (reason := compile_failure_reason(error)):
        incident = NotCompiled(step=step, reason=reason)
    else:
        return None
    add_recovery_event(store, uri, incident)
    return Restart(incident.message)


def restart_with_smaller_batch(store: Store, uri: str, recipe: Recipe, step: int) -> Restart:
    """The restart after `step` did not fit into memory with the micro-batch of `recipe`. `uri` is of the run's checkpoints.

    Raises:
        BadConfiguration: there is nothing smaller to start again with.
    """
    incident = halve_micro_batch(recipe, read_recovery_log(store, uri), step)
    add_recovery_event(store, uri, incident)
    return Restart(incident.message)


def update_incidents(
    known: RecoveryLog, store: Store, uri: str, recipe: Recipe, work: Path, *, done: int, repeats: Sequence[RecoveryEvent]
) -> RecoveryLog:
    """The incidents of a run that goes on after step `done`: those `known`, with one more where the kernel has just ended it
    for want of memory, and with those of the run that it repeats that hold by then.

    Another program may have taken that memory: where there is no smaller micro-batch, the run goes on as it was.
    """
    oom_marker = work / OUT_OF_MEMORY_FILE
    found = known.replay_events(repeats, done)
    if oom_marker.exists():
        try:
            incident = halve_micro_batch(found.shrink_recipe(recipe), found, None)
        except BadConfiguration as problem:
            log_line(f"the kernel ended the program for want of memory: {problem}")
        else:
            found = found.with_event(incident)
            log_line(f"the kernel ended the program: {incident.message}")
    found = found.resume_after(done)
    if found != known:
        write_recovery_log(store, uri, found)
    oom_marker.unlink(missing_ok=True)
    return found


def roll_back(
    store: Store,
    uri: str,
    recipe: Recipe,
    checkpoints: CheckpointManager,
    samples: RunSamples,
    found: Divergence,
    repeats: Sequence[RecoveryEvent],
) -> tuple[int, Path] | None:
    """The last checkpoint from before a divergence, which is the newest from now on; None where there is none.

    They go before the incident is written: a program that is killed in between comes here again by the same steps. A run
    that was sent back, and has no good checkpoint on its way, goes back to where it was sent; where that is spoilt already
    it would come to the same again, and ends.

    Raises:
        Restart: the recipe allows to go on without the samples of the bad steps; or the last good one lies in parts on
            several machines, which bring it as the run goes on.
    """
    first = first_corrupt_step(found.first)
    checkpoints.discard_from(first_discarded_step(found, repeats))
    checkpoints.require_complete_parts()
    start_checkpoint = checkpoints.latest() or checkpoints.find_rewind_start()
    good_checkpoint = start_checkpoint if start_checkpoint and start_checkpoint[0] < first else None
    skipping_divergences = [entry for entry in read_recovery_log(store, uri).diverged if entry.skipped]
    continues = (
        recipe.divergence.action == "skip"
        and len(skipping_divergences) < MAX_PER_KIND
        and start_checkpoint == good_checkpoint
    )
    incident = Diverged(
        step=found.first,
        noticed=found.noticed,
        reason=found.reason,
        way=checkpoints.uri.removeprefix(uri).strip("/") or ".",
        rolled_back_to=good_checkpoint[0] if good_checkpoint else None,
        skipped=samples.step_positions(first, found.noticed) if continues else None,
        at=time.time_ns() // 1_000_000 if continues else None,
    )
    add_recovery_event(store, uri, incident)
    if continues:
        raise Restart(incident.message)
    log_line(incident.message)
    return good_checkpoint
