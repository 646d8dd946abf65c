"""What a run does not go on from after it diverged, on whichever machine it lies.

What belongs here: the rule, and how a machine forgets. What does not: where the run goes on instead
(`recipes.training.recovery`).
"""

import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from recipes.checkpoints.local import remove_from, steps_in, sweep, ways_in
from recipes.checkpoints.manager import Checkpoints
from recipes.contracts.divergence import Divergence, spoilt_from
from recipes.contracts.recovery_log import Diverged, Incident, ends_of
from recipes.runner import say
from recipes.storage.artifact_store import MANIFEST
from recipes.storage.manifest import Manifest

DIVERGENCES = "divergences"
"""The fact in a checkpoint's manifest: how many divergences of its run had been written down as it was saved."""


def first_discarded(found: Divergence, repeats: Sequence[Incident]) -> int:
    """The step from which on a run does not go on after a divergence.

    Checkpoints are saved by the clock too: a run that `repeats` this divergence goes back to the same step, not to a newer
    one of its own.
    """
    then = [entry.rolled_back_to or 0 for entry in ends_of(repeats) if entry.noticed == found.noticed]
    return min([spoilt_from(found.first), *(step + 1 for step in then)])


def forget_beside(checkpoints: Checkpoints, found: Divergence, repeats: Sequence[Incident]) -> None:
    """Remove what a machine has, beside the leader's, of what is not gone on from after a divergence.

    Before the leader rolls back: where the machines have changed places by the next start, this one says where to go on, and
    had fetched a whole checkpoint that is spoilt.
    """
    remove_from(checkpoints.folder, first_discarded(found, repeats))


def forget_spoilt(folder: Path, diverged: Sequence[Diverged]) -> None:
    """Remove what was saved before the run `diverged`, and was spoilt by then, from the folder of a machine.

    One that was away at that time still has it. Where the others have no newer one, it said where to go on; and the run went
    on from what it had been healed of, with that written in its record.
    """
    for way in ways_in(folder) if diverged else ():
        sweep(way)
        name = way.relative_to(folder).as_posix()
        for step in steps_in(way):
            if is_spoilt(step, name, later_than(way / str(step), diverged)):
                say(f"checkpoint {step} is of what the run was healed of while this machine was away: not gone on from")
                shutil.rmtree(way / str(step))


def is_spoilt(step: int, way: str, later: Iterable[Diverged]) -> bool:
    """Whether a checkpoint of that way is, by what has happened since it was saved."""
    return any(entry.way == way and step >= spoilt_from(entry.step) for entry in later)


def later_than(checkpoint: Path, diverged: Sequence[Diverged]) -> Sequence[Diverged]:
    """Those that had not happened yet as it was saved; none where it does not say, as those of earlier versions."""
    with suppress(FileNotFoundError, ValidationError):
        known = Manifest.model_validate_json((checkpoint / MANIFEST).read_bytes()).facts.get(DIVERGENCES)
        return diverged[known:] if isinstance(known, int) else ()
    return ()
