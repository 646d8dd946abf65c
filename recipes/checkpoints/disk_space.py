"""Free disk space for one more checkpoint.

Local checkpoints exist for a fast resume: five of a 72B model are 4 TB, which would fill the disk and end the run.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

from recipes.checkpoints.commit import checkpoint_file_bytes
from recipes.checkpoints.local import list_local_steps
from recipes.checkpoints.remote import RemoteCheckpoints
from recipes.runner import log_line
from recipes.storage.artifact_store import MANIFEST_FILE


def free_disk_space(folder: Path, stored: RemoteCheckpoints, kept_step: int | None, free: Callable[[Path], int]) -> None:
    """Delete local copies of stored checkpoints until one of the newest's size fits.

    Deletes the oldest first, but neither the newest nor `kept_step`. `free` returns a disk's free bytes. Waiting for a
    pending upload is better than ending the run.
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
    """Delete `older` checkpoints until `needed_bytes` are free; return whether they are."""
    with stored.removal_lock:
        for old in sorted(stored.complete_steps & older):
            if free(folder) >= needed_bytes:
                return True
            log_line(f"checkpoint {old} stays in the store only: the disk has no room for it")
            shutil.rmtree(folder / str(old), ignore_errors=True)
    return free(folder) >= needed_bytes
