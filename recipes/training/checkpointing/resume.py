"""One checkpoint that all processes of a run go on from, whatever each machine has in its folder.

Where folders outlive a restart, the leader's newest may have been on its way to the store as all were killed, and others
have none of it: they trained on from different checkpoints, until one waited for the other.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Literal

from recipes.checkpoints.commit import content_of
from recipes.checkpoints.local import leave_only
from recipes.checkpoints.manager import Checkpoints
from recipes.contracts.job import BadConfiguration
from recipes.contracts.rewind import SentBack, way_from
from recipes.training.checkpointing.checkpoint_assembly import bring_together
from recipes.training.parallel.process_group import Group
from recipes.training.resuming import where_to_resume

Found = tuple[int, Path]


@dataclass(frozen=True)
class Place:
    """Where the leader goes on, in terms that hold on every machine.

    `left_at` are the steps at which the run left one way for the next. After the first `ways_before` of them lies the
    checkpoint of `step`, with that `content`; none at the beginning.
    """

    left_at: tuple[int, ...]
    ways_before: int = 0
    step: int | None = None
    content: str = ""


def resume_together(
    checkpoints: Checkpoints, resume_from: Literal["latest", "best"] | int, sent_back: Sequence[SentBack], group: Group
) -> tuple[Checkpoints, Found | None]:
    """`where_to_resume` as the leader sees it, for all processes at once.

    What lies in parts on their machines is made whole before. One process of each node looks for itself while the leader
    does, and nearly always has the same by then: it is the one that fetches.

    Raises:
        BadConfiguration: there is no valid checkpoint of the step to resume from.
        Restart: the store has not what the leader goes on from.
    """
    asked = {back.step for back in sent_back} | ({resume_from} if isinstance(resume_from, int) else set())
    bring_together(checkpoints, group, asked)
    seen: Found | None = None
    place: Place | None = None
    if group.leads:
        way, seen = where_to_resume(checkpoints, resume_from, sent_back)
        place = place_of(way, seen, checkpoints)
        if place.step is not None and group.size > group.on_this_node:
            along(checkpoints, place.left_at[: place.ways_before]).offer(place.step)
    elif group.local_rank == 0:
        with suppress(BadConfiguration):  # what is not here may be with the leader
            _, seen = where_to_resume(checkpoints, resume_from, sent_back)
    place = group.share(place)
    assert place is not None
    way = along(checkpoints, place.left_at)
    if place.step is None:
        if group.local_rank == 0 and not group.leads:
            leave_only(way.folder, 0)
        return way, None
    holder = along(checkpoints, place.left_at[: place.ways_before])
    found = place.step, holder.folder / str(place.step)
    if group.local_rank == 0 and not group.leads:
        if seen != found or content_of(found[1]) != place.content:
            holder.take(place.step, place.content)
        leave_only(holder.folder, place.step)
    group.collect(None)
    return way, found


def place_of(way: Checkpoints, found: Found | None, checkpoints: Checkpoints) -> Place:
    """Of a run whose first way is `checkpoints`."""
    left_at: list[int] = []
    last = way
    while last.before:
        last, step = last.before
        left_at.insert(0, step)
    if found is None:
        return Place(tuple(left_at))
    step, folder = found
    return Place(tuple(left_at), len(folder.relative_to(checkpoints.folder).parts) - 1, step, content_of(folder))


def along(checkpoints: Checkpoints, left_at: Sequence[int]) -> Checkpoints:
    """The way that a run is on after it left those before at these steps."""
    return reduce(lambda way, step: way.below(way_from(step), step), left_at, checkpoints)
