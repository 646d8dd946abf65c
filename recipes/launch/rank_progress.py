"""Progress of a training's processes, written to the work folder for the pod's launcher."""

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

PROGRESS_FOLDER = "progress"
"""Folder in a job's work folder. Its reader creates it; without it no progress is written."""


class RankProgress(BaseModel):
    """Progress counters of a process.

    Args:
        events: number of steps, micro-batches and similar that it has started or finished.
        collectives: number of collectives it has started, by process group. A waiting process has started one more than the
            process that it waits for.
        silent_seconds: time since it wrote the file. The writer is a thread, which continues while the program only waits.
    """

    model_config = ConfigDict(frozen=True)

    events: int
    collectives: Mapping[str, int] = {}
    silent_seconds: float = 0.0


def progress_file(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.json"


def read_progress(folder: Path, now: float) -> dict[int, RankProgress]:
    """Read the progress of this pod's training processes by rank.

    `now` is in seconds since 1970.
    """
    found: dict[int, RankProgress] = {}
    for path in folder.glob("*.json"):
        try:
            progress = RankProgress.model_validate_json(path.read_bytes())
            silent_seconds = max(0.0, now - path.stat().st_mtime)
            found[int(path.stem)] = progress.model_copy(update={"silent_seconds": silent_seconds})
        except (OSError, ValueError, ValidationError):  # the process is ending, or the disk was full
            continue
    return found
