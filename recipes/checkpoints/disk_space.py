"""Room on a machine's disk for one more checkpoint.

What is here is for a fast return; of 72B parameters five checkpoints are 4 TB, which would fill the disk and end the run.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

from recipes.checkpoints.commit import size_of
from recipes.checkpoints.local import steps_in
from recipes.checkpoints.remote import StoredCheckpoints
from recipes.runner import say
from recipes.storage.artifact_store import MANIFEST


def make_room(folder: Path, stored: StoredCheckpoints, spared: int | None, free: Callable[[Path], int]) -> None:
    """Where the disk of `folder` has none for one more checkpoint as large as the newest, those go that are `stored` too.

    The oldest first, but neither the newest nor the one that is `spared`. `free` says how many bytes a disk has left.

    To wait for one that is on its way to the store is less than a run that ends.
    """
    newest, *others = steps_in(folder) or [0]
    older = {*others} - {spared}
    if older and (folder / str(newest) / MANIFEST).exists():
        wanted = size_of(folder / str(newest)) * (2 if stored.compression else 1)
        if not has_room(folder, stored, older, wanted, free):
            stored.finish()
            has_room(folder, stored, older, wanted, free)


def has_room(folder: Path, stored: StoredCheckpoints, older: set[int], wanted: int, free: Callable[[Path], int]) -> bool:
    """Whether there is room for so many bytes, perhaps without some of the checkpoints `older` than the newest."""
    with stored.taking:
        for old in sorted(stored.arrived & older):
            if free(folder) >= wanted:
                return True
            say(f"checkpoint {old} stays in the store alone: the disk has no room for it here")
            shutil.rmtree(folder / str(old), ignore_errors=True)
    return free(folder) >= wanted
