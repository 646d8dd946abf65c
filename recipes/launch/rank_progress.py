"""Progress of a training's processes, as each writes it into the work folder for the launcher of its pod."""

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

PROGRESS_FOLDER = "progress"
"""In the work folder of a job. Who wants to know the progress makes it; without it nobody writes any."""


class RankProgress(BaseModel):
    """How far a process has come.

    Args:
        events: steps, micro-batches and the like that it has begun or done.
        collectives: by group of processes, how many exchanges it has begun. One that waits has begun one more than the
            process that it waits for.
        silent_seconds: how long ago it wrote this. The thread that writes goes on where the program only waits.
    """

    model_config = ConfigDict(frozen=True)

    events: int
    collectives: Mapping[str, int] = {}
    silent_seconds: float = 0.0


def progress_file(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.json"


def read_progress(folder: Path, now: float) -> dict[int, RankProgress]:
    """By rank, of the processes of this pod that train right now. `now` is in seconds since 1970."""
    found: dict[int, RankProgress] = {}
    for path in folder.glob("*.json"):
        try:
            progress = RankProgress.model_validate_json(path.read_bytes())
            silent_seconds = max(0.0, now - path.stat().st_mtime)
            found[int(path.stem)] = progress.model_copy(update={"silent_seconds": silent_seconds})
        except (OSError, ValueError, ValidationError):  # it ends right now, or had no disk space to write
            continue
    return found
