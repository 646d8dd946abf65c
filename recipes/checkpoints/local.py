"""List and clean local checkpoints, and evict uploaded ones when the disk is full."""

import shutil
from collections.abc import Callable
from pathlib import Path

from recipes.checkpoints.commit import checkpoint_file_bytes, complete_interrupted_commit
from recipes.checkpoints.node_parts import part_in_folder
from recipes.checkpoints.remote import DOWNLOAD_FOLDER, RemoteCheckpoints
from recipes.checkpoints.retention import CheckpointQuality, parse_quality
from recipes.runner import log_line
from recipes.storage.artifact_store import MANIFEST_FILE

# A run's checkpoints as they lie on this machine: below its folder, one folder a step.
#
# What belongs here: what lies there. What does not: one of them (`recipes.checkpoints.commit`), and what becomes of them
# (`recipes.checkpoints.manager`).


def list_local_steps(folder: Path) -> list[int]:
    """Newest first, valid or not."""
    names = (path.name for path in folder.iterdir()) if folder.is_dir() else iter(())
    return sorted((int(name) for name in names if name.isdigit()), reverse=True)


def list_branches(folder: Path) -> list[Path]:
    """The folder of a run's checkpoints, and those below it of where it was sent back."""
    return [folder, *folder.rglob("from-*")]


def read_local_qualities(folder: Path) -> dict[int, CheckpointQuality]:
    return {step: read_local_quality(folder / str(step)) for step in list_local_steps(folder)}


def read_local_quality(checkpoint: Path) -> CheckpointQuality:
    try:
        return parse_quality((checkpoint / MANIFEST_FILE).read_bytes())
    except FileNotFoundError:
        return CheckpointQuality()


def clean_interrupted_writes(folder: Path) -> None:
    """Remove what a process that was killed left half written or half downloaded: nothing is being written meanwhile.

    What was whole and lacked nothing but its name gets it.
    """
    for path in (*folder.glob(".*.tmp"), folder / DOWNLOAD_FOLDER):
        step = path.name[1 : -len(".tmp")]
        if step.isdigit() and complete_interrupted_commit(path, folder / step):
            log_line(f"checkpoint {step} was whole, and has its name now")
        else:
            shutil.rmtree(path, ignore_errors=True)


def keep_only_step(folder: Path, step: int) -> None:
    """Of a machine that goes on from `step` as another says: what it fetched for its earlier starts nobody reads again, and
    its parts of what came after that step are of weights that are no more.
    """
    for old in set(list_local_steps(folder)) - {step}:
        if old > step or part_in_folder(folder / str(old)) is None:
            shutil.rmtree(folder / str(old))


def remove_steps_from(folder: Path, step: int) -> None:
    """Remove those of `step` and later."""
    for later in list_local_steps(folder):
        if later >= step:
            shutil.rmtree(folder / str(later))


# Room on a machine's disk for one more checkpoint.
#
# What is here is for a fast return; of 72B parameters five checkpoints are 4 TB, which would fill the disk and end the
# run.


def free_disk_space(folder: Path, stored: RemoteCheckpoints, kept_step: int | None, free: Callable[[Path], int]) -> None:
    """Where the disk of `folder` has none for one more checkpoint as large as the newest, those go that are `stored` too.

    The oldest first, but neither the newest nor the one that is `kept_step`. `free` says how many bytes a disk has left.

    To wait for one that is on its way to the store is less than a run that ends.
    """
    newest, *older_steps = list_local_steps(folder) or [0]
    older = {*older_steps} - {kept_step}
    if older and (folder / str(newest) / MANIFEST_FILE).exists():
        needed_bytes = checkpoint_file_bytes(folder / str(newest)) * (2 if stored.compression else 1)
        if not evict_until_free(folder, stored, older, needed_bytes, free):
            stored.drain_uploads()
            evict_until_free(folder, stored, older, needed_bytes, free)


def evict_until_free(
    folder: Path, stored: RemoteCheckpoints, older: set[int], needed_bytes: int, free: Callable[[Path], int]
) -> bool:
    """Whether there is room for so many bytes, perhaps without some of the checkpoints `older` than the newest."""
    with stored.removal_lock:
        for old in sorted(stored.complete_steps & older):
            if free(folder) >= needed_bytes:
                return True
            log_line(f"checkpoint {old} stays in the store alone: the disk has no room for it here")
            shutil.rmtree(folder / str(old), ignore_errors=True)
    return free(folder) >= needed_bytes
