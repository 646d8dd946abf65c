"""Parts of checkpoints that several machines have saved, brought to the store before anybody looks for where to go on.

All may have been killed while they were on their way there. Where the folders outlive that, nothing of them is lost; and
what had arrived counts, though its machine is gone.
"""

import shutil
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path, PurePath, PurePosixPath
from typing import NamedTuple

from recipes.checkpoint_folder import broken
from recipes.checkpoint_parts import PARTS, Part, make_whole, part_in, part_of, parts_at
from recipes.checkpoints import Checkpoints
from recipes.local_checkpoints import standing_in, sweep
from recipes.retention import Standing, kept, standing_of
from recipes.runner import say
from recipes.store import MANIFEST
from recipes.training.group import Group


class Place(NamedTuple):
    """The checkpoint of `step`, in the folder `way` below those that the run began with; of these it is "."."""

    way: str
    step: int


class Found(NamedTuple):
    """A part, in the folder of a machine or in the store."""

    place: Place
    part: Part
    standing: Standing


def bring_together(checkpoints: Checkpoints, group: Group) -> None:
    """Have in the store the newest checkpoint of which all parts are somewhere, and the best. All processes call it at once.

    `checkpoints` are those that the run began with. What is not as it was written is no part, and is removed; so is one of
    which another is nowhere: the run would never end well, as the best of all may be waited for.
    """
    while True:
        here = parts_below(checkpoints.folder) if group.local_rank == 0 else []
        everywhere = [found for parts in group.collect(here) for found in parts]
        stored, whole = group.share(in_store(checkpoints) if group.leads else ([], []))
        complete = all_found([*everywhere, *stored])
        wanted, arrived = still_wanted(complete, whole), {found.part for found in stored}
        mine = [found for found in here if found.part.save in wanted and found.part not in arrived]
        sent = [send(checkpoints, found) for found in mine]
        if not group.any(not all(sent)):
            break
    if group.leads:  # the last to arrive may have been killed before it said so
        for save in wanted:
            make_whole(checkpoints.store, uri_of(checkpoints, complete[save].place), complete[save].part)
    for found in here:
        if found.part.save not in complete and found.place not in whole:
            say(f"checkpoint {found.place.step} is a part, and others are nowhere: falling back")
            shutil.rmtree(checkpoints.folder / found.place.way / str(found.place.step))


def all_found(parts: Iterable[Found]) -> dict[str, Found]:
    """One part of each save of which there are all."""
    numbers: dict[str, set[int]] = defaultdict(set)
    known: dict[str, Found] = {}
    for found in parts:
        numbers[found.part.save].add(found.part.number)
        known[found.part.save] = found
    return {save: found for save, found in known.items() if len(numbers[save]) == found.part.of}


def still_wanted(complete: Mapping[str, Found], whole: Collection[Place]) -> set[str]:
    """The saves that are to be made whole: of each way the newest and the best, where the store has them not as a whole.

    Those of other ways are wanted too: a user may send the run back to them.
    """
    ways: dict[str, dict[int, Standing]] = defaultdict(dict)
    for way, step in whole:
        ways[way][step] = Standing()
    for found in complete.values():
        ways[found.place.way][found.place.step] = found.standing
    best = {Place(way, step) for way, standings in ways.items() for step in kept(standings, 1)}
    return {save for save, found in complete.items() if found.place in best.difference(whole)}


def parts_below(folder: Path) -> list[Found]:
    """Those that lie on this machine."""
    for way in (folder, *folder.rglob("from-*")):
        sweep(way)
    manifests = [path for path in folder.rglob(MANIFEST) if path.parent.name.isdigit()]
    return [
        Found(place_of(path.parent.relative_to(folder)), part, standing_in(path.parent))
        for path in manifests
        if (part := part_in(path.parent))
    ]


def in_store(checkpoints: Checkpoints) -> tuple[list[Found], list[Place]]:
    """The parts of what is not whole there, and what is."""
    parts, whole = set[Place](), set[Place]()
    for uri in checkpoints.store.list(checkpoints.uri):
        path = PurePosixPath(uri.removeprefix(f"{checkpoints.uri}/"))
        if path.name == MANIFEST and path.parent.name.isdigit():
            whole.add(place_of(path.parent))
        elif path.parent.name == PARTS:
            parts.add(place_of(path.parent.parent))
    found = [
        Found(place, part, standing_of(manifest.to_bytes()))
        for place in parts - whole
        for manifest in parts_at(checkpoints.store, uri_of(checkpoints, place))
        if (part := part_of(manifest))
    ]
    return found, [*whole]


def send(checkpoints: Checkpoints, found: Found) -> bool:
    """Upload a part of this machine; False where it is not as it was written."""
    stored = checkpoints.stored.below(found.place.way)
    folder = stored.folder / str(found.place.step)
    if problem := broken(folder, found.place.step):
        say(f"checkpoint {found.place.step} {problem}: falling back")
        shutil.rmtree(folder)
        return False
    stored.send(found.place.step)
    return True


def place_of(path: PurePath) -> Place:
    return Place(path.parent.as_posix(), int(path.name))


def uri_of(checkpoints: Checkpoints, place: Place) -> str:
    return f"{checkpoints.stored.below(place.way).uri}/{place.step}"
