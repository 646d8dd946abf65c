"""Assemble checkpoints whose parts are on several machines and in the object store."""

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
    """Step and branch of a checkpoint.

    The branch is a folder below the run's first checkpoints, "." for those.
    """

    branch: str
    step: int


class FoundPart(NamedTuple):
    """A node's part of a checkpoint, found on a machine or in the store."""

    location: CheckpointLocation
    part: CheckpointPart
    quality: CheckpointQuality


def assemble_checkpoints(checkpoints: CheckpointManager, group: ProcessGroup, asked: Collection[int] = ()) -> None:
    """Complete multi-node checkpoints in the store by uploading missing parts.

    All processes must call it together. Completes the newest and the best checkpoint of which all parts exist, and those of
    the steps in `asked`. A corrupt part is removed; so is a part whose siblings are lost, because it used to be taken for
    the best checkpoint, and the run waited for the missing parts at its end.

    Args:
        checkpoints: manager of the run's first branch.
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
    if group.is_leader:  # the process that uploaded the last part may have been killed before it committed
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
    group.all_gather(None)  # barrier: a machine that read the store earlier resumed from an older checkpoint


def find_complete_saves(parts: Iterable[FoundPart]) -> dict[CheckpointLocation, FoundPart]:
    """Map each location to one part of a save whose parts were all found.

    Parts of different saves of one step are never mixed; if two saves are complete, one is returned.
    """
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
    """Return the saves to complete in the store: each branch's newest and best.

    For each step in `asked` also the newest and the best up to that step, because a run that left a branch there may publish
    its best until then. Branches that the run has left count too: a user may rewind the run to them. `whole` checkpoints are
    complete in the store already.
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
    """Return the parts on this machine."""
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
    """List the store: parts of incomplete checkpoints, complete checkpoints, and locations that are incomplete."""
    parts, whole, known = set[CheckpointLocation](), set[CheckpointLocation](), set[CheckpointLocation]()
    for uri in checkpoints.store.list(checkpoints.uri):
        path = PurePosixPath(uri.removeprefix(f"{checkpoints.uri}/"))
        if steps := [above for above in path.parents if above.name.isdigit()]:
            known.add(parse_location(steps[-1]))  # the outermost: a checkpoint may contain folders with numeric names
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
    """Delete incomplete checkpoints at `places` from the store if this machine lacks their parts too.

    On a branch that the run has left nothing else removes them, and one part of a 72B model is hundreds of GB. Errors are
    only logged: a leftover must not end the run.
    """
    for location in places:
        if local_folder(checkpoints, location).is_dir():
            continue
        try:
            checkpoints.stored.branch(location.branch).delete(location.step)
        except Exception as error:
            problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
            log_line(f"checkpoint {location.step} lost its other parts, but was not deleted: {problem}")
        else:
            log_line(f"checkpoint {location.step} was deleted from the store: it is incomplete and its other parts are lost")


def upload_part(checkpoints: CheckpointManager, found: FoundPart) -> bool:
    """Upload a part of this machine with retries.

    Return False if it was corrupt and removed. Without retries a single error of the store once ended the start on all
    machines.
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
