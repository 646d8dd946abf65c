"""A run's checkpoints as they lie on this machine: below its folder, one folder a step.

What belongs here: what lies there. What does not: one of them (`recipes.checkpoints.commit`), and what becomes of them
(`recipes.checkpoints.manager`).
"""

import shutil
from pathlib import Path

from recipes.checkpoints.commit import finish
from recipes.checkpoints.node_parts import part_in
from recipes.checkpoints.remote import DOWNLOAD
from recipes.checkpoints.retention import Standing, standing_of
from recipes.runner import say
from recipes.storage.artifact_store import MANIFEST


def steps_in(folder: Path) -> list[int]:
    """Newest first, valid or not."""
    names = (path.name for path in folder.iterdir()) if folder.is_dir() else iter(())
    return sorted((int(name) for name in names if name.isdigit()), reverse=True)


def ways_in(folder: Path) -> list[Path]:
    """The folder of a run's checkpoints, and those below it of where it was sent back."""
    return [folder, *folder.rglob("from-*")]


def standings_in(folder: Path) -> dict[int, Standing]:
    return {step: standing_in(folder / str(step)) for step in steps_in(folder)}


def standing_in(checkpoint: Path) -> Standing:
    try:
        return standing_of((checkpoint / MANIFEST).read_bytes())
    except FileNotFoundError:
        return Standing()


def sweep(folder: Path) -> None:
    """Remove what a process that was killed left half written or half downloaded: nothing is being written meanwhile.

    What was whole and lacked nothing but its name gets it.
    """
    for path in (*folder.glob(".*.tmp"), folder / DOWNLOAD):
        step = path.name[1 : -len(".tmp")]
        if step.isdigit() and finish(path, folder / step):
            say(f"checkpoint {step} was whole, and has its name now")
        else:
            shutil.rmtree(path, ignore_errors=True)


def leave_only(folder: Path, step: int) -> None:
    """Of a machine that goes on from `step` as another says: what it fetched for its earlier starts nobody reads again, and
    its parts of what came after that step are of weights that are no more.
    """
    for old in set(steps_in(folder)) - {step}:
        if old > step or part_in(folder / str(old)) is None:
            shutil.rmtree(folder / str(old))


def remove_from(folder: Path, step: int) -> None:
    """Remove those of `step` and later."""
    for bad in steps_in(folder):
        if bad >= step:
            shutil.rmtree(folder / str(bad))
