"""Tensors in several safetensors files, each of which has some of their rows: whoever reads takes the rows that it needs.

The rows of a tensor follow each other as the files say, or else in the order of the files that have it. So a model that
transformers has saved in several files is read too: there one file has all rows of a tensor. Where files say so, some are
enough for whoever reads the rows that they have (`recipes.checkpoints.shard_selection`).
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from recipes.checkpoints.shard_selection import PLACES, ROWS
from recipes.counted import counted
from recipes.training.checkpointing.staging import Staging
from recipes.training.parallel.process_group import Group

FIRST_ROWS = "first_rows"
"""In the metadata of files of an earlier version: the number of the first of its rows, by tensor."""
PIECE = 16 << 20
"""Numbers of a tensor that `pieces` holds at a time; one row may be more."""


class Piece(NamedTuple):
    """Some rows of a tensor, in one file; `first` counts from 0."""

    first: int
    shape: Sequence[int]
    opened: Any


class Rows(NamedTuple):
    """Which rows of a tensor a process writes: from `first` on, of `total`."""

    first: int
    total: int


class RowFiles:
    """Only what is asked for is read."""

    def __init__(self, files: Sequence[Path]) -> None:
        found: dict[str, list[Piece]] = defaultdict(list)
        self._totals: dict[str, int] = {}
        for file in files:
            opened: Any = safe_open(file, framework="pt")
            metadata = opened.metadata() or {}
            places = json.loads(metadata.get(PLACES, "{}"))
            first_rows = {name: first for name, (first, _) in places.items()} | json.loads(metadata.get(FIRST_ROWS, "{}"))
            self._totals |= {name: total for name, (_, total) in places.items()}
            for name in opened.offset_keys():
                shape = opened.get_slice(name).get_shape()
                before = sum(piece.shape[0] for piece in found[name] if shape)
                found[name].append(Piece(first_rows.get(name, before), shape, opened))
        self._pieces = {name: sorted(pieces, key=lambda piece: piece.first) for name, pieces in found.items()}

    @property
    def names(self) -> list[str]:
        return list(self._pieces)

    def shape(self, name: str) -> torch.Size | None:
        """Of a whole tensor; none where there is no such tensor."""
        if name not in self._pieces:
            return None
        return torch.Size([self._total(name), *shape[1:]] if (shape := self._pieces[name][0].shape) else [])

    def _total(self, name: str) -> int:
        return self._totals.get(name, sum(piece.shape[0] for piece in self._pieces[name]))

    def read(self, name: str, rows: range | None = None) -> torch.Tensor:
        """Some rows of a tensor, or all that there is of it.

        Raises:
            ValueError: they are in none of the files.
        """
        pieces = self._pieces[name]
        if not pieces[0].shape or (rows is None and len(pieces) == 1 and name not in self._totals):
            return pieces[0].opened.get_tensor(name)  # type: ignore[no-any-return]
        wanted = range(self._total(name)) if rows is None else rows
        found = []
        for first, shape, opened in pieces:
            start, stop = max(wanted.start - first, 0), min(wanted.stop - first, shape[0])
            if start < stop:
                found.append(opened.get_slice(name)[start:stop])
        read = torch.cat(found) if found else opened.get_slice(name)[:0]
        if len(read) != len(wanted):
            raise ValueError(f"of {name}, rows {wanted.start} to {wanted.stop} are not all in the files that are here")
        return read

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """A tensor from its beginning to its end, in whole rows: one after the other, none of them large.

        Raises:
            ValueError: some are in none of the files.
        """
        read = 0
        for _, (rows, *rest), opened in self._pieces[name]:
            some = max(1, PIECE // torch.Size(rest).numel())
            for first in range(0, rows, some):
                yield opened.get_slice(name)[first : first + some]
            read += rows
        if read != self._total(name):
            raise ValueError(f"of {name}, {read} of {counted(self._total(name), 'row')} are in the files that are here")


def write_rows(
    tensors: Mapping[str, torch.Tensor],
    stem: str,
    folder: Path,
    group: Group,
    staging: Staging,
    places: Mapping[str, Rows] | None = None,
) -> None:
    """A file from each process, with its rows. All call it at once; when `staging` is done, those of a node are in the
    `folder` of its first process.

    `places` are needed where rows are not in the order of the processes, or are to be read without all files.
    """
    name = f"{stem}{ROWS}{group.rank + 1:05}-of-{group.size:05}.safetensors"
    file = Path(group.share_on_node(str(folder))) / name
    metadata = {PLACES: json.dumps(places)} if places else None

    def write(rows: dict[str, torch.Tensor]) -> None:
        save_file(rows, file, metadata)
        group.wait_on_node()

    staging.later(dict(tensors), write)
