"""Checkpoints of several nodes whose assembly was interrupted."""

import shutil
from collections.abc import Collection, Sequence

from recipes.checkpoints.manager import CheckpointManager
from recipes.checkpoints.node_parts import PARTS_FOLDER, CheckpointPart
from recipes.checkpoints.retention import CheckpointQuality
from recipes.storage.artifact_store import MANIFEST_FILE, Store
from recipes.training.checkpointing.checkpoint_assembly import (
    CheckpointLocation,
    FoundPart,
    find_complete_saves,
    select_saves_to_upload,
)
from tests.support.recipes.checkpoint_parts import URI, save


def forget(store: Store, *uris: str) -> None:
    """Delete the objects, as if they had never arrived."""
    for uri in uris:
        store.delete(uri)


def save_without_saying_so(machines: Sequence[CheckpointManager], step: int, loss: float | None = None) -> None:
    """Save a checkpoint whose last node dies before writing the common manifest.

    Its part is stored, and all machines lose their local files.
    """
    store = machines[0].store
    save(machines, step, loss=loss)
    forget(store, f"{URI}/{step}/{MANIFEST_FILE}")
    for number, machine in enumerate(machines, 1):
        store.put_bytes(
            f"{URI}/{step}/{PARTS_FOLDER}/{number}-of-2.json", (machine.folder / str(step) / MANIFEST_FILE).read_bytes()
        )
        shutil.rmtree(machine.folder)


def found(step: int, number: int, save: str, of: int = 2, way: str = ".", loss: float | None = None) -> FoundPart:
    return FoundPart(CheckpointLocation(way, step), CheckpointPart(number=number, of=of, save=save), CheckpointQuality(loss))


def wanted(parts: list[FoundPart], whole: dict[int, float | None] | None = None, asked: Collection[int] = ()) -> set[str]:
    there = {CheckpointLocation(".", step): CheckpointQuality(loss) for step, loss in (whole or {}).items()}
    return select_saves_to_upload(find_complete_saves(parts), there, asked)
