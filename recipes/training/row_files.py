"""Tensors in several safetensors files, each of which has some of their rows: whoever reads takes the rows that it needs.

The rows of a tensor follow each other as the files say, or else in the order of the files that have it. So a model that
transformers has saved in several files is read too: there one file has all rows of a tensor.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from recipes.training.group import Group
from recipes.training.staging import Staging

FIRST_ROWS = "first_rows"
"""In the metadata of a file: the number of the first of its rows, by tensor."""
PIECE = 16 << 20
"""Numbers of a tensor that `pieces` holds at a time; one row may be more."""


class RowFiles:
    """Only what is asked for is read."""

    def __init__(self, files: Sequence[Path]) -> None:
        found: dict[str, list[tuple[int, Any]]] = defaultdict(list)
        for file in files:
            opened: Any = safe_open(file, framework="pt")
            first_rows = json.loads((opened.metadata() or {}).get(FIRST_ROWS, "{}"))
            for name in opened.offset_keys():
                found[name].append((first_rows.get(name, 0), opened))
        self._holders = {name: [opened for _, opened in sorted(parts, key=itemgetter(0))] for name, parts in found.items()}

    @property
    def names(self) -> list[str]:
        return list(self._holders)

    def shape(self, name: str) -> torch.Size | None:
        """Of a whole tensor; none where there is no such tensor."""
        shapes = [opened.get_slice(name).get_shape() for opened in self._holders.get(name, ())]
        if not shapes:
            return None
        return torch.Size([sum(shape[0] for shape in shapes), *shapes[0][1:]] if shapes[0] else [])

    def read(self, name: str, rows: range | None = None) -> torch.Tensor:
        """Some rows of a tensor, or all that there is of it."""
        if rows is None:
            parts = [opened.get_tensor(name) for opened in self._holders[name]]
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        found = []
        first = 0
        for piece in (opened.get_slice(name) for opened in self._holders[name]):
            shape = piece.get_shape()
            start, stop = max(rows.start - first, 0), min(rows.stop - first, shape[0])
            if start < stop:
                found.append(piece[start:stop])
            first += shape[0]
        return torch.cat(found) if found else torch.empty(0, *shape[1:])

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """A tensor from its beginning to its end, in whole rows: one after the other, none of them large."""
        for found in (opened.get_slice(name) for opened in self._holders[name]):
            total, *rest = found.get_shape()
            some = max(1, PIECE // torch.Size(rest).numel())
            for first in range(0, total, some):
                yield found[first : first + some]


def rows_of(total: int, rank: int, processes: int) -> range:
    """The rows that a process holds where FSDP2 has spread a tensor: equally many each, fewer or none at the end."""
    each = -(-total // processes)
    return range(min(total, each * rank), min(total, each * (rank + 1)))


def write_rows(
    tensors: Mapping[str, torch.Tensor],
    stem: str,
    folder: Path,
    group: Group,
    staging: Staging,
    first_rows: Mapping[str, int] | None = None,
) -> None:
    """A file from each process, with its rows. All call it at once; when `staging` is done, those of a node are in the
    `folder` of its first process.

    `first_rows` are needed of tensors whose rows are not in the order of the processes.
    """
    name = f"{stem}-rows-{group.rank + 1:05}-of-{group.size:05}.safetensors"
    file = Path(group.share_on_node(str(folder))) / name

    def write(rows: dict[str, torch.Tensor]) -> None:
        save_file(rows, file, {FIRST_ROWS: json.dumps(first_rows)} if first_rows else None)
        group.wait_on_node()

    staging.later(dict(tensors), write)
