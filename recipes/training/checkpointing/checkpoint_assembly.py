"""Parts of checkpoints that several machines have saved, brought to the store before anybody looks for where to go on.

All may have been killed while they were on their way there. Where the folders outlive that, nothing of them is lost; and
what had arrived counts, though its machine is gone.
"""

import math
import shutil
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from pathlib import Path, PurePath, PurePosixPath
from typing import NamedTuple

from recipes.checkpoints.commit import broken
from recipes.checkpoints.local import standing_in, sweep, ways_in
from recipes.checkpoints.manager import Checkpoints
from recipes.checkpoints.node_parts import PARTS, Part, make_whole, part_in, part_of, parts_at
from recipes.checkpoints.retention import Standing, kept, standing_of
from recipes.checkpoints.upload_retry import retry_upload
from recipes.runner import say
from recipes.storage.artifact_store import MANIFEST
from recipes.training.parallel.process_group import Group


class Place(NamedTuple):
    """The checkpoint of `step`, in the folder `way` below those that the run began with; of these it is "."."""

    way: str
    step: int


class Found(NamedTuple):
    """A part, in the folder of a machine or in the store."""

    place: Place
    part: Part
    standing: Standing


def bring_together(checkpoints: Checkpoints, group: Group, asked: Collection[int] = ()) -> None:
    """Have in the store the newest checkpoint of which all parts are somewhere, the best, and those of the steps that are
    `asked` for. All processes call it at once.

    `checkpoints` are those that the run began with. What is not as it was written is no part, and is removed; so is one
    of which others are lost: it passed for the best, and the end of the run waited for it.
    """
    while True:
        here = parts_below(checkpoints.folder) if group.local_rank == 0 else []
        everywhere = [found for parts in group.collect(here) for found in parts]
        stored, whole, unfinished = group.share(in_store(checkpoints) if group.leads else ([], {}, set()))
        complete = whole_together([*everywhere, *stored])
        wanted, arrived = still_wanted(complete, whole, asked), {found.part for found in stored}
        mine = [found for found in here if found.part.save in wanted and found.part not in arrived]
        sent = [send(checkpoints, found) for found in mine]
        if not group.any(not all(sent)):
            break
    if group.leads:  # the last to arrive may have been killed before it said so
        for found in complete.values():
            if found.part.save in wanted:
                uri = uri_of(checkpoints, found.place)
                retry_upload(found.place.step, partial(make_whole, checkpoints.store, uri, found.part))
    for found in here:
        if found.place not in {*whole, *complete}:
            say(f"checkpoint {found.place.step} is a part, and others are lost")
            shutil.rmtree(folder_of(checkpoints, found.place))
    if group.leads:
        forget_half(checkpoints, unfinished.difference(complete))
    group.collect(None)  # a machine that looked before that fetched the one before


def whole_together(parts: Iterable[Found]) -> dict[Place, Found]:
    """One part of each save of which every part was found; of two saves of a step one is enough, and they are not mixed."""
    numbers: dict[str, set[int]] = defaultdict(set)
    known: dict[str, Found] = {}
    for found in parts:
        numbers[found.part.save].add(found.part.number)
        known[found.part.save] = found
    return {found.place: found for save, found in sorted(known.items()) if len(numbers[save]) == found.part.of}


def still_wanted(complete: Mapping[Place, Found], whole: Mapping[Place, Standing], asked: Collection[int] = ()) -> set[str]:
    """The saves that are to be made whole: of each way the newest and the best, also of what came up to a step that is
    `asked` for: of a way that the run left there, it may publish the best until then.

    Those of other ways are wanted too: a user may send the run back to them. `whole` are in the store as they should be.
    """
    ways: dict[str, dict[int, Standing]] = defaultdict(dict)
    for place, standing in ({place: found.standing for place, found in complete.items()} | {**whole}).items():
        ways[place.way][place.step] = standing
    wanted = {
        Place(way, step)
        for way, standings in ways.items()
        for last in (math.inf, *asked)
        for step in kept({step: one for step, one in standings.items() if step <= last}, 1)
    }
    return {found.part.save for place, found in complete.items() if place in wanted.difference(whole)}


def parts_below(folder: Path) -> list[Found]:
    """Those that lie on this machine."""
    for way in ways_in(folder):
        sweep(way)
    manifests = [path for path in folder.rglob(MANIFEST) if path.parent.name.isdigit()]
    return [
        Found(place_of(path.parent.relative_to(folder)), part, standing_in(path.parent))
        for path in manifests
        if (part := part_in(path.parent))
    ]


def in_store(checkpoints: Checkpoints) -> tuple[list[Found], dict[Place, Standing], set[Place]]:
    """The parts of what is not whole there, what is, and whatever is not."""
    parts, whole, known = set[Place](), set[Place](), set[Place]()
    for uri in checkpoints.store.list(checkpoints.uri):
        path = PurePosixPath(uri.removeprefix(f"{checkpoints.uri}/"))
        if steps := [above for above in path.parents if above.name.isdigit()]:
            known.add(place_of(steps[-1]))  # the outermost: a checkpoint may have folders with such names
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
    return found, {place: checkpoints.stored.below(place.way).standing(place.step) for place in whole}, known - whole


def forget_half(checkpoints: Checkpoints, places: Iterable[Place]) -> None:
    """Delete from the store what is not whole at `places`, and can never be: it is on no machine.

    On a way that the run has left nobody else looks, and of 72B parameters a part that had no time to be followed by the
    others is hundreds of GB. No run ends for what is left there.
    """
    for place in places:
        if folder_of(checkpoints, place).is_dir():
            continue
        try:
            checkpoints.stored.below(place.way).delete(place.step)
        except Exception as error:
            problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
            say(f"what had arrived of checkpoint {place.step}, whose rest is lost, was not deleted: {problem}")
        else:
            say(f"what had arrived of checkpoint {place.step} is deleted: the rest is lost")


def send(checkpoints: Checkpoints, found: Found) -> bool:
    """Upload a part of this machine, as in the background: what a store refuses once ended the start of all machines.

    False where it is not as it was written.
    """
    stored = checkpoints.stored.below(found.place.way)
    folder = stored.folder / str(found.place.step)
    if problem := broken(folder, found.place.step):
        say(f"checkpoint {found.place.step} {problem}: falling back")
        shutil.rmtree(folder)
        return False
    retry_upload(found.place.step, partial(stored.send, found.place.step))
    return True


def place_of(path: PurePath) -> Place:
    return Place(path.parent.as_posix(), int(path.name))


def folder_of(checkpoints: Checkpoints, place: Place) -> Path:
    return checkpoints.folder / place.way / str(place.step)


def uri_of(checkpoints: Checkpoints, place: Place) -> str:
    return f"{checkpoints.stored.below(place.way).uri}/{place.step}"
