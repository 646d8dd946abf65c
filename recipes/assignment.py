"""Which split a record comes to: by what it asks, or as it says itself.

Records that ask the same thing in other capitals or punctuation stay together, so that no test question was trained on.
Holds some 40 bytes a record in memory, however long the records are.
"""

import hashlib
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from recipes.parameters import SplitParameters
from recipes.schema import BadConfiguration

SPLITS = ("train", "validation", "test")
TRAIN = SPLITS.index("train")
OTHER_NAMES = {"training": "train", "val": "validation", "valid": "validation", "dev": "validation", "eval": "validation"}


def split_named(value: object) -> str | None:
    """The split that a record's own column names, in any of the names that the field uses."""
    name = str(value).strip().lower()
    name = OTHER_NAMES.get(name, name)
    return name if name in SPLITS else None


def draw(text: str, seed: int) -> int:
    """The place of a question in the order by which it comes to a split, 64 bits; test has the first, then validation."""
    return int.from_bytes(hashlib.sha256(f"{seed}\0{text}".encode()).digest()[:8])


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


def refuse_no_groups(groups: Collection[str], parameters: SplitParameters) -> None:
    """Raises BadConfiguration where no record is in a group: the column is misspelt."""
    if parameters.group_by and set(groups) == {""}:
        raise BadConfiguration(f"no record has a value in the column '{parameters.group_by}': correct split.group_by")


def named(split: NDArray[np.int8], column: str) -> NDArray[np.int8]:
    """The splits that the records name themselves. Raises BadConfiguration where one of them has no record."""
    for place, name in enumerate(SPLITS):
        if not (split == place).any():
            raise BadConfiguration(f"no record has '{name}' in '{column}': a dataset needs all of {', '.join(SPLITS)}")
    return split


def leaks(draw: NDArray[np.uint64], split: NDArray[np.int8]) -> int:
    """How many held-out records ask what a training record asks."""
    return int(np.isin(draw[split != TRAIN], draw[split == TRAIN]).sum())
