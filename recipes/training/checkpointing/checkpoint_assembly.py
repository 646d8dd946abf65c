"""Assemble checkpoints whose parts lie on several machines and in the store."""

import math
import shutil
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from pathlib import Path, PurePath, PurePosixPath
from typing import NamedTuple

from recipes.checkpoints.commit import find_corruption
from recipes.checkpoints.local import clean_interrupted_writes, list_branches, read_local_quality
from recipes.checkpoints.manager import CheckpointManager
from recipes.checkpoints.node_parts import (
    PARTS_FOLDER,
    CheckpointPart,
    assemble_if_complete,
    list_uploaded_parts,
    part_from_manifest,
    part_in_folder,
)
from recipes.checkpoints.retention import CheckpointQuality, parse_quality, select_kept_steps
from recipes.checkpoints.upload import retry_upload
from recipes.runner import log_line
from recipes.storage.artifact_store import MANIFEST_FILE
from recipes.training.parallel.process_group import ProcessGroup


class CheckpointLocation(NamedTuple):
    """The checkpoint of `step`, in the folder `branch` below those that the run began with; of these it is "."."""

    branch: str
    step: int


class FoundPart(NamedTuple):
    """A part, in the folder of a machine or in the store."""

    location: CheckpointLocation
    part: CheckpointPart
    quality: CheckpointQuality


def assemble_checkpoints(checkpoints: CheckpointManager, group: ProcessGroup, asked: Collection[int] = ()) -> None:
    """Have in the store the newest checkpoint of which all parts are somewhere, the best, and those of the steps that are
    `asked` for. All processes call it at once.

    `checkpoints` are those that the run began with. What is not as it was written is no part, and is removed; so is one
    of which others are lost: it passed for the best, and the end of the run waited for it.
    """
    while True:
        local_parts = find_local_parts(checkpoints.folder) if group.local_rank == 0 else []
        all_parts = [found for parts in group.all_gather(local_parts) for found in parts]
        stored, whole, unfinished = group.broadcast(find_stored_parts(checkpoints) if group.is_leader else ([], {}, set()))
        complete = find_complete_saves([*all_parts, *stored])
        wanted, arrived = select_saves_to_upload(complete, whole, asked), {found.part for found in stored}
        parts_to_send = [found for found in local_parts if found.part.save in wanted and found.part not in arrived]
        sent = [upload_part(checkpoints, found) for found in parts_to_send]
        if not group.any(not all(sent)):
            break
    if group.is_leader:  # the last to arrive may have been killed before it said so
        for found in complete.values():
            if found.part.save in wanted:
                uri = checkpoint_uri(checkpoints, found.location)
                retry_upload(found.location.step, partial(assemble_if_complete, checkpoints.store, uri, found.part))
    for found in local_parts:
        if found.location not in {*whole, *complete}:
            log_line(f"checkpoint {found.location.step} is a part, and others are lost")
            shutil.rmtree(local_folder(checkpoints, found.location))
    if group.is_leader:
        delete_incomplete_checkpoints(checkpoints, unfinished.difference(complete))
    group.all_gather(None)  # a machine that looked before that fetched the one before


def find_complete_saves(parts: Iterable[FoundPart]) -> dict[CheckpointLocation, FoundPart]:
    """One part of each save of which every part was found; of two saves of a step one is enough, and they are not mixed."""
    numbers: dict[str, set[int]] = defaultdict(set)
    known: dict[str, FoundPart] = {}
    for found in parts:
        numbers[found.part.save].add(found.part.number)
        known[found.part.save] = found
    return {found.location: found for save, found in sorted(known.items()) if len(numbers[save]) == found.part.of}


def select_saves_to_upload(
    complete: Mapping[CheckpointLocation, FoundPart],
    whole: Mapping[CheckpointLocation, CheckpointQuality],
    asked: Collection[int] = (),
) -> set[str]:
    """The saves that are to be made whole: of each way the newest and the best, also of what came up to a step that is
    `asked` for: of a way that the run left there, it may publish the best until then.

    Those of other ways are wanted too: a user may send the run back to them. `whole` are in the store as they should be.
    """
    branches: dict[str, dict[int, CheckpointQuality]] = defaultdict(dict)
    for location, standing in ({location: found.quality for location, found in complete.items()} | {**whole}).items():
        branches[location.branch][location.step] = standing
    wanted = {
        CheckpointLocation(branch, step)
        for branch, standings in branches.items()
        for last in (math.inf, *asked)
        for step in select_kept_steps({step: one for step, one in standings.items() if step <= last}, 1)
    }
    return {found.part.save for location, found in complete.items() if location in wanted.difference(whole)}


def find_local_parts(folder: Path) -> list[FoundPart]:
    """Those that lie on this machine."""
    for branch in list_branches(folder):
        clean_interrupted_writes(branch)
    manifests = [path for path in folder.rglob(MANIFEST_FILE) if path.parent.name.isdigit()]
    return [
        FoundPart(parse_location(path.parent.relative_to(folder)), part, read_local_quality(path.parent))
        for path in manifests
        if (part := part_in_folder(path.parent))
    ]


def find_stored_parts(
    checkpoints: CheckpointManager,
) -> tuple[list[FoundPart], dict[CheckpointLocation, CheckpointQuality], set[CheckpointLocation]]:
    """The parts of what is not whole there, what is, and whatever is not."""
    parts, whole, known = set[CheckpointLocation](), set[CheckpointLocation](), set[CheckpointLocation]()
    for uri in checkpoints.store.list(checkpoints.uri):
        path = PurePosixPath(uri.removeprefix(f"{checkpoints.uri}/"))
        if steps := [above for above in path.parents if above.name.isdigit()]:
            known.add(parse_location(steps[-1]))  # the outermost: a checkpoint may have folders with such names
        if path.name == MANIFEST_FILE and path.parent.name.isdigit():
            whole.add(parse_location(path.parent))
        elif path.parent.name == PARTS_FOLDER:
            parts.add(parse_location(path.parent.parent))
    found = [
        FoundPart(location, part, parse_quality(manifest.to_bytes()))
        for location in parts - whole
        for manifest in list_uploaded_parts(checkpoints.store, checkpoint_uri(checkpoints, location))
        if (part := part_from_manifest(manifest))
    ]
    return (
        found,
        {location: checkpoints.stored.branch(location.branch).quality(location.step) for location in whole},
        known - whole,
    )


def delete_incomplete_checkpoints(checkpoints: CheckpointManager, places: Iterable[CheckpointLocation]) -> None:
    """Delete from the store what is not whole at `places`, and can never be: it is on no machine.

    On a way that the run has left nobody else looks, and of 72B parameters a part that had no time to be followed by the
    others is hundreds of GB. No run ends for what is left there.
    """
    for location in places:
        if local_folder(checkpoints, location).is_dir():
            continue
        try:
            checkpoints.stored.branch(location.branch).delete(location.step)
        except Exception as error:
            problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
            log_line(f"what had arrived of checkpoint {location.step}, whose rest is lost, was not deleted: {problem}")
        else:
            log_line(f"what had arrived of checkpoint {location.step} is deleted: the rest is lost")


def upload_part(checkpoints: CheckpointManager, found: FoundPart) -> bool:
    """Upload a part of this machine, as in the background: what a store refuses once ended the start of all machines.

    False where it is not as it was written.
    """
    stored = checkpoints.stored.branch(found.location.branch)
    folder = stored.folder / str(found.location.step)
    if problem := find_corruption(folder, found.location.step):
        log_line(f"checkpoint {found.location.step} {problem}: falling back")
        shutil.rmtree(folder)
        return False
    retry_upload(found.location.step, partial(stored.send, found.location.step))
    return True


def parse_location(path: PurePath) -> CheckpointLocation:
    return CheckpointLocation(path.parent.as_posix(), int(path.name))


def local_folder(checkpoints: CheckpointManager, location: CheckpointLocation) -> Path:
    return checkpoints.folder / location.branch / str(location.step)


def checkpoint_uri(checkpoints: CheckpointManager, location: CheckpointLocation) -> str:
    return f"{checkpoints.stored.branch(location.branch).uri}/{location.step}"
