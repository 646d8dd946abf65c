"""List and clean the checkpoints of a run on this machine."""

import shutil
from pathlib import Path

from recipes.checkpoints.commit import complete_interrupted_commit
from recipes.checkpoints.node_parts import part_in_folder
from recipes.checkpoints.remote import DOWNLOAD_FOLDER
from recipes.checkpoints.retention import CheckpointQuality, parse_quality
from recipes.runner import log_line
from recipes.storage.artifact_store import MANIFEST_FILE

# A run's checkpoints on this machine: one folder per step.
#
# Single checkpoints are handled in `recipes.checkpoints.commit`, their life cycle in `recipes.checkpoints.manager`.


def list_local_steps(folder: Path) -> list[int]:
    """List steps, newest first, valid or not."""
    names = (path.name for path in folder.iterdir()) if folder.is_dir() else iter(())
    return sorted((int(name) for name in names if name.isdigit()), reverse=True)


def list_branches(folder: Path) -> list[Path]:
    """List the folder of a run's checkpoints and its branches, which rewinds created."""
    return [folder, *folder.rglob("from-*")]


def read_local_qualities(folder: Path) -> dict[int, CheckpointQuality]:
    return {step: read_local_quality(folder / str(step)) for step in list_local_steps(folder)}


def read_local_quality(checkpoint: Path) -> CheckpointQuality:
    try:
        return parse_quality((checkpoint / MANIFEST_FILE).read_bytes())
    except FileNotFoundError:
        return CheckpointQuality()


def clean_interrupted_writes(folder: Path) -> None:
    """Remove partial writes and downloads of a killed process; nothing may be writing.

    A complete checkpoint that was not renamed yet is committed.
    """
    for path in (*folder.glob(".*.tmp"), folder / DOWNLOAD_FOLDER):
        step = path.name[1 : -len(".tmp")]
        if step.isdigit() and complete_interrupted_commit(path, folder / step):
            log_line(f"checkpoint {step} was complete: commit finished")
        else:
            shutil.rmtree(path, ignore_errors=True)


def keep_only_step(folder: Path, step: int) -> None:
    """Remove checkpoints of a machine that resumes from `step` as decided elsewhere.

    Copies fetched for earlier starts are not needed again, and parts of later steps belong to discarded weights.
    """
    for old in set(list_local_steps(folder)) - {step}:
        if old > step or part_in_folder(folder / str(old)) is None:
            shutil.rmtree(folder / str(old))


def remove_steps_from(folder: Path, step: int) -> None:
    """Remove the checkpoints of `step` and later."""
    for later in list_local_steps(folder):
        if later >= step:
            shutil.rmtree(folder / str(later))
