"""The attempts of a job: what the next one needs to know, and whether the last one made progress."""

from pathlib import Path

from pydantic import BaseModel

from recipes.contracts.exit_reason import ExitReason
from recipes.storage.artifact_store import MANIFEST_FILE
from resources.compute.local.work_folder import ATTEMPT_FILE, CHECKPOINTS_FOLDER
from resources.stack.detached_process import LOG_FILE

PROGRESS_SECONDS = 3600.0
"""An attempt that ran for so long made progress: a run of weeks is killed more often than one that never gets anywhere."""


class Start(BaseModel, frozen=True):
    """The next attempt; of a restart, how the last attempt ended, and how many attempts ended by a fault.

    `used` are the seconds of its time limit that a job had used when it began to wait: waiting uses none, however many
    supervisors were killed while they were starting it.
    """

    attempt: int
    faults: int
    used: float | None = None
    detail: str = ""
    reason: ExitReason | None = None


def made_progress(work: Path) -> bool:
    """Whether the last attempt did: a run that saves checkpoints may be killed any number of times and still completes."""
    manifests = (work / CHECKPOINTS_FOLDER).rglob(MANIFEST_FILE)
    saved = [file.stat().st_mtime for file in manifests if file.parent.name.isdigit()]
    ran_long = attempt_seconds(work) > PROGRESS_SECONDS
    return ran_long or (bool(saved) and max(saved) > (work / ATTEMPT_FILE).stat().st_mtime)


def attempt_seconds(work: Path) -> float:
    """Seconds from the start of the last attempt to the last line of its log."""
    log = work / LOG_FILE
    return log.stat().st_mtime - (work / ATTEMPT_FILE).stat().st_mtime if log.is_file() else 0.0
