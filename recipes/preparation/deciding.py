"""What only the whole dataset can tell: how often a record stands in its split.

Which split that is says `recipes.assignment`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recipes.assignment import TRAIN
from recipes.preparation.hashing import mixed


@dataclass(frozen=True)
class Decisions:
    """Of each record, in the order of the input: the place of its split in `SPLITS`, and how many copies of it there are."""

    split: NDArray[np.int8]
    copies: NDArray[np.int32]
    leaked: int
    oversampled: Mapping[str, int]


def oversample(
    split: NDArray[np.int8], classes: NDArray[np.int64], names: Sequence[str], draw: NDArray[np.uint64], seed: int
) -> tuple[NDArray[np.int32], dict[str, int]]:
    """Copies of each record, so that all classes have as many training records as the largest; and those that were added.

    Records without a class, whose name is empty, are none. Held-out records stay as they are: scores on repeated ones would
    count some of them twice.
    """
    copies = np.ones(len(split), dtype=np.int32)
    train = (split == TRAIN) & np.array([bool(name) for name in names], dtype=np.bool_)[classes]
    counts = np.bincount(classes[train], minlength=len(names))
    target = int(counts.max(initial=0))
    added: dict[str, int] = {}
    for code, name in enumerate(names):
        members = np.flatnonzero(train & (classes == code))
        if len(members) in (0, target):
            continue
        each, rest = divmod(target, len(members))
        copies[members] = each
        # Who stands there once more is drawn, not those that come first.
        copies[members[np.argsort(mixed(draw[members], seed), kind="stable")[:rest]]] += 1
        added[name] = target - len(members)
    return copies, added
