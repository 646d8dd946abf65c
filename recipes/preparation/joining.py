"""Two questions that differ in what was masked alone are one question then: their records must stay together.

Records are joined by what they asked and by what they ask since, whatever lies between them: components of a graph, whose
lowest number wanders from side to side until none changes. Most records are joined to no other, and are left out of that.
"""

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from recipes.preparation.split_assignment import Draws
from recipes.records.disk_partitions import Column, Scratch, rows_of

AS_IT_WAS = 0xFFFFFFFFFFFFFFFF
SLOTS = 8
"""For each record, of a byte each: fewer where these are more than memory holds."""
EDGE = np.dtype([("draw", "<u8"), ("masked", "<u8"), ("found", "<u8"), ("place", "<u8")])


def together(records: Callable[[], Iterable[tuple[Draws, Draws]]], total: int, scratch: Scratch) -> Column | None:
    """The draw of each record, of the question as it was, made equal for those that ask the same since it was masked.

    They take the lowest, which is held out first, so that nothing that the version before held out is trained on.

    Args:
        records: gives of each of `total` records the draw of its question as it was and as it is, as often as it is called.

    Returns:
        the draws of those that have another one now, and `AS_IT_WAS` for all others; None where no question was masked.
    """
    touched = touched_by_masking(records(), min(SLOTS * total, scratch.held_bytes))
    if touched is None:
        return None
    edges = scratch.partitions("edges", EDGE, total)
    before = 0
    for draw, masked in records():
        chosen = np.flatnonzero((draw != masked) | touched[slots(draw, len(touched))])
        rows = rows_of(EDGE, draw[chosen], masked[chosen], draw[chosen], before + chosen)
        edges.add(edges.of_hashes(rows["masked"]), rows)
        before += len(draw)
    # All of one draw have the lowest of theirs, which is their own: those of one question as it is may not.
    side, other = "masked", "draw"
    while True:
        changed = False
        after = scratch.partitions(other, EDGE, total)
        with edges:
            for number in range(edges.count):
                members, lowest = lowest_of_each((rows[side], rows["found"]) for rows in edges.pieces(number))
                for rows in edges.pieces(number):
                    found = lowest[np.searchsorted(members, rows[side])]
                    changed = changed or bool((found != rows["found"]).any())
                    after.add(
                        after.of_hashes(rows[other]), rows_of(EDGE, rows["draw"], rows["masked"], found, rows["place"])
                    )
        edges, side, other = after, other, side
        if not changed:
            break
    joined = scratch.column("joined", np.uint64, total, AS_IT_WAS)
    with edges:
        for number in range(edges.count):
            for rows in edges.pieces(number):
                joined.put(rows["place"], rows["found"])
    return joined


def touched_by_masking(records: Iterable[tuple[Draws, Draws]], most: int) -> NDArray[np.bool_] | None:
    """Marks at up to `most` slots of all draws that a masked question has, before or since; None where there is none.

    A record that is at none of them is joined to no other. Few more are at one than are joined to some other, unless memory
    holds few slots for very many masked questions: those that are at one are only looked at in vain.
    """
    touched = np.zeros(1 << most.bit_length() - 1 if most else 1, np.bool_)
    found = False
    for draw, masked in records:
        changed = draw != masked
        for draws in (draw[changed], masked[changed]):
            touched[slots(draws, len(touched))] = True
            found = found or bool(len(draws))
    return touched if found else None


def slots(draws: Draws, count: int) -> Draws:
    """A place among `count`, a power of two, for each draw."""
    return draws & np.uint64(count - 1)


def lowest_of_each(pieces: Iterable[tuple[Draws, Draws]]) -> tuple[Draws, Draws]:
    """All members, in order, and the lowest value that each has."""
    members, lowest = np.zeros(0, np.uint64), np.zeros(0, np.uint64)
    for more, values in pieces:
        members, values = np.concatenate([members, more]), np.concatenate([lowest, values])
        order = np.lexsort((values, members))
        members, firsts = np.unique(members[order], return_index=True)
        lowest = values[order][firsts]
    return members, lowest
