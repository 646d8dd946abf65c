"""What only the whole dataset can tell: which split a record belongs to, and how often it stands there.

Holds 40 bytes a record in memory, however long the records are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recipes.parameters import SplitParameters
from recipes.preparation.hashing import mixed
from recipes.schema import BadConfiguration
from recipes.split import SPLITS

TRAIN = SPLITS.index("train")
NOT_NAMED = -1


@dataclass(frozen=True)
class Decisions:
    """Of each record, in the order of the input: the place of its split in `SPLITS`, and how many copies of it there are."""

    split: NDArray[np.int8]
    copies: NDArray[np.int32]
    leaked: int
    oversampled: Mapping[str, int]


def assign(draw: NDArray[np.uint64], groups: NDArray[np.int64], parameters: SplitParameters) -> NDArray[np.int8]:
    """The split of each record. Records of one draw ask the same thing, and stay together.

    Args:
        groups: a number for each record's group, the same for all where there is none.

    Raises:
        BadConfiguration: a split would be empty.
    """
    clusters, first, member = np.unique(draw, return_index=True, return_inverse=True)
    group = groups[first]
    by_group = np.lexsort((clusters, group))
    begins = np.r_[True, group[by_group[1:]] != group[by_group[:-1]]] if len(by_group) else np.zeros(0, dtype=bool)
    places = np.arange(len(by_group))
    rank = np.empty(len(by_group), dtype=np.int64)
    rank[by_group] = places - np.maximum.accumulate(np.where(begins, places, 0))
    order = np.lexsort((clusters, rank)) if parameters.group_by else np.argsort(clusters)
    test = round(len(order) * parameters.test)
    validation = round(len(order) * parameters.validation)
    chosen = np.full(len(order), TRAIN, dtype=np.int8)
    chosen[order[:test]] = SPLITS.index("test")
    chosen[order[test : test + validation]] = SPLITS.index("validation")
    for place, name in enumerate(SPLITS):
        if not (chosen == place).any():
            raise BadConfiguration(f"{len(order)} distinct records are too few: the {name} split would be empty")
    return chosen[member]


def named(split: NDArray[np.int8], column: str) -> NDArray[np.int8]:
    """The splits that the records name themselves. Raises BadConfiguration where one of them has no record."""
    for place, name in enumerate(SPLITS):
        if not (split == place).any():
            raise BadConfiguration(f"no record has '{name}' in '{column}': a dataset needs all of {', '.join(SPLITS)}")
    return split


def leaks(draw: NDArray[np.uint64], split: NDArray[np.int8]) -> int:
    """How many held-out records ask what a training record asks."""
    return int(np.isin(draw[split != TRAIN], draw[split == TRAIN]).sum())


def oversample(
    split: NDArray[np.int8], classes: NDArray[np.int64], names: Sequence[str], draw: NDArray[np.uint64], seed: int
) -> tuple[NDArray[np.int32], dict[str, int]]:
    """Copies of each record, so that all classes have as many training records as the largest; and those that were added.

    Held-out records stay as they are: scores on repeated ones would count some of them twice.
    """
    copies = np.ones(len(split), dtype=np.int32)
    train = split == TRAIN
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
