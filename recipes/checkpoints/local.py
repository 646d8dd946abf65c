"""List and clean the checkpoints of a run on this machine."""

import shutil
from pathlib import Path

from recipes.checkpoints.commit import complete_interrupted_commit
from recipes.checkpoints.node_parts import part_in_folder
from recipes.checkpoints.remote import DOWNLOAD_FOLDER
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
