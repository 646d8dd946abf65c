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

# Out of memory: continue with a smaller micro-batch and the same effective batch.


def halve_micro_batch(recipe: Recipe, incidents: RecoveryLog, step: int | None) -> OutOfMemory:
    """Return the recovery event that halves the micro-batch and doubles the accumulation.

    If half is no divisor of the effective batch, the next smaller divisor is used.

    Args:
        step: the step that did not fit with `recipe`, or None if it is unknown.

    Raises:
        BadConfiguration: the micro-batch is already 1, or was reduced `MAX_PER_KIND` times.
    """
    problem = f"{describe_step(step)} does not fit into memory with batch_size {recipe.batch_size}"
    advice = "give a shorter sequence_length, gradient_checkpointing: true, method qlora, or hardware with more memory"
    if recipe.batch_size == 1:
        raise BadConfiguration(f"{problem}, and there is no smaller one: {advice}")
    half = recipe.with_max_batch_size(recipe.batch_size // 2)
    found = OutOfMemory(step=step, batch_size=half.batch_size, gradient_accumulation=half.gradient_accumulation)
    # Another process of the run, at the same step on another GPU, may have recorded the same event a moment ago.
    if len(incidents.out_of_memory) >= MAX_PER_KIND and found not in incidents.entries:
        raise BadConfiguration(f"{problem}, after it was reduced {MAX_PER_KIND} times: {advice}")
    return found


# Divergence: checkpoints from the first discarded step on are removed on every machine that holds some.

DIVERGENCES_FACT = "divergences"
"""Manifest fact of a checkpoint: how many divergences of its run were recorded when it was saved."""


def first_discarded_step(found: Divergence, repeats: Sequence[RecoveryEvent]) -> int:
    """Return the first step whose checkpoints must not be resumed from after a divergence.

    Checkpoints are also saved by time: a replay (`repeats` is not empty) must roll back to the same step as the original
    run, not to a newer checkpoint of its own.
    """
    earlier_steps = [
        entry.rolled_back_to or 0 for entry in find_final_divergences(repeats) if entry.noticed == found.noticed
    ]
    return min([first_corrupt_step(found.first), *(step + 1 for step in earlier_steps)])


def discard_local_checkpoints(checkpoints: CheckpointManager, found: Divergence, repeats: Sequence[RecoveryEvent]) -> None:
    """Remove the checkpoints on a non-leader machine that a divergence discards.

    Must run before the leader rolls back. If the machines swap roles at the next start, this one chooses the checkpoint to
    resume from, and it would choose one of diverged weights.
    """
    remove_steps_from(checkpoints.folder, first_discarded_step(found, repeats))


def discard_diverged_checkpoints(folder: Path, diverged: Sequence[Diverged]) -> None:
    """Remove checkpoints of `folder` that were saved before a divergence that discards them.

    A machine that was away when the run diverged still has them. If the other machines had nothing newer, the run used to
    resume from the diverged weights, although its record said that it had recovered.
    """
    for way in list_branches(folder) if diverged else ():
        clean_interrupted_writes(way)
        name = way.relative_to(folder).as_posix()
        for step in list_local_steps(way):
            if is_diverged(step, name, divergences_since(way / str(step), diverged)):
                log_line(f"checkpoint {step} was discarded by a recovery while this machine was away: deleting it")
                shutil.rmtree(way / str(step))


def is_diverged(step: int, way: str, later_divergences: Iterable[Diverged]) -> bool:
    """Return whether a divergence recorded after checkpoint `step` of branch `way` discards it."""
    return any(entry.way == way and step >= first_corrupt_step(entry.step) for entry in later_divergences)


def divergences_since(checkpoint: Path, diverged: Sequence[Diverged]) -> Sequence[Diverged]:
    """Return the divergences recorded after a checkpoint was saved.

    Empty if its manifest lacks the fact, as in earlier versions.
    """
    with suppress(FileNotFoundError, ValidationError):
        known = Manifest.model_validate_json((checkpoint / MANIFEST_FILE).read_bytes()).facts.get(DIVERGENCES_FACT)
        return diverged[known:] if isinstance(known, int) else ()
    return ()


# Recovery from errors in a step: out of memory, divergence, an operation without a deterministic kernel, a block that
# cannot be compiled. The event is recorded first, then the program restarts.


def recover_from_error(
    error: Exception, incidents: RecoveryLog, store: Store, uri: str, recipe: Recipe, step: int
) -> Restart | None:
    """Record the recovery for an error and return the restart; None for other errors.

    Args:
        uri: where the run's checkpoints and its recovery log are stored.

    Raises:
        BadConfiguration: out of memory, and the micro-batch cannot be reduced further.
    """
    if is_out_of_memory(error):  # also raised by the compiler, which benchmarks kernels
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
    """Record a smaller micro-batch after `step` ran out of memory and return the restart.

    Args:
        uri: where the run's checkpoints and its recovery log are stored.

    Raises:
        BadConfiguration: the micro-batch cannot be reduced further.
    """
    incident = halve_micro_batch(recipe, read_recovery_log(store, uri), step)
    add_recovery_event(store, uri, incident)
    return Restart(incident.message)


def update_incidents(
    known: RecoveryLog, store: Store, uri: str, recipe: Recipe, work: Path, *, done: int, repeats: Sequence[RecoveryEvent]
) -> RecoveryLog:
    """Return the recovery log of a run that resumes after step `done`, stored if changed.

    It consists of the `known` events, those of the replayed run (`repeats`) up to this step, and one more if the kernel has
    just killed the program for lack of memory. In that case another program may have used the memory: where the micro-batch
    cannot be reduced, the run resumes unchanged.
    """
    oom_marker = work / OUT_OF_MEMORY_FILE
    found = known.replay_events(repeats, done)
    if oom_marker.exists():
        try:
            incident = halve_micro_batch(found.shrink_recipe(recipe), found, None)
        except BadConfiguration as problem:
            log_line(f"the kernel killed the program for lack of memory: {problem}")
        else:
            found = found.with_event(incident)
            log_line(f"the kernel killed the program: {incident.message}")
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
    """Discard checkpoints from a divergence on and return the last good one, if any.

    Checkpoints are deleted before the event is recorded: a program that is killed in between reaches the same divergence
    again. A run that was rewound and has no good checkpoint on its branch returns to where it was rewound to; if that
    checkpoint is already bad, the run would diverge again, so it ends.

    Raises:
        Restart: the recipe allows skipping the samples of the bad steps; or the parts of the last good checkpoint are on
            several machines and are fetched at the restart.
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
