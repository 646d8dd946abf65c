"""Read and write tensors split by rows over safetensors files, and consolidate them."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.core_model_loading import dot_natural_key

from recipes.checkpoints.node_parts import PLACES_KEY, ROWS_MARKER
from recipes.contracts.quantities import pluralize
from recipes.training.checkpointing.safetensors_writer import write_safetensors
from recipes.training.checkpointing.staging import Staging
from recipes.training.parallel.process_group import ProcessGroup

# Tensors split by rows over several safetensors files; a reader reads only the rows that it needs.
#
# The row range of each piece is in the file's metadata; without metadata, pieces follow each other in the order of the
# files. Models that transformers saved in several files work too: there each tensor is entirely in one file. With metadata
# a subset of the files suffices for reading the rows in them (`recipes.checkpoints.node_parts`).

FIRST_ROWS_KEY = "first_rows"
"""Metadata key in files of an earlier version: the number of the first row, by tensor."""
MAX_PIECE_ELEMENTS = 16 << 20
"""Maximum elements per piece of `iter_pieces`; a single row may exceed it."""


class TensorPiece(NamedTuple):
    """Consecutive rows of a tensor in one file; `first` counts from 0."""

    first: int
    shape: Sequence[int]
    opened: Any


class RowRange(NamedTuple):
    """Rows of a tensor that a process writes: from `first` on, of `total`."""

    first: int
    total: int


class ShardedTensors:
    """Lazy reader of tensors that are split by rows over several files."""

    def __init__(self, files: Sequence[Path]) -> None:
        found: dict[str, list[TensorPiece]] = defaultdict(list)
        self._totals: dict[str, int] = {}
        for file in files:
            opened: Any = safe_open(file, framework="pt")
            metadata = opened.metadata() or {}
            places = json.loads(metadata.get(PLACES_KEY, "{}"))
            first_rows = {name: first for name, (first, _) in places.items()} | json.loads(
                metadata.get(FIRST_ROWS_KEY, "{}")
            )
            self._totals |= {name: total for name, (_, total) in places.items()}
            for name in opened.offset_keys():
                shape = opened.get_slice(name).get_shape()
                before = sum(piece.shape[0] for piece in found[name] if shape)
                found[name].append(TensorPiece(first_rows.get(name, before), shape, opened))
        self._pieces = {name: sorted(pieces, key=lambda piece: piece.first) for name, pieces in found.items()}

    @property
    def names(self) -> list[str]:
        return list(self._pieces)

    def shape(self, name: str) -> torch.Size | None:
        """Return the shape of the whole tensor, or None if there is no such tensor."""
        if name not in self._pieces:
            return None
        return torch.Size([self._total(name), *shape[1:]] if (shape := self._pieces[name][0].shape) else [])

    def _total(self, name: str) -> int:
        return self._totals.get(name, sum(piece.shape[0] for piece in self._pieces[name]))

    def read(self, name: str, rows: range | None = None) -> torch.Tensor:
        """Read some rows of a tensor, by default all.

        Raises:
            ValueError: some of the rows are in none of the files.
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
            raise ValueError(f"{name}: rows {wanted.start} to {wanted.stop} are not all in these files")
        return read

    def iter_pieces(self, name: str) -> Iterator[torch.Tensor]:
        """Yield a tensor in order, in pieces of whole rows of at most `MAX_PIECE_ELEMENTS`.

        Raises:
            ValueError: some rows are in none of the files.
        """
        read = 0
        for _, (rows, *rest), opened in self._pieces[name]:
            some = max(1, MAX_PIECE_ELEMENTS // torch.Size(rest).numel())
            for first in range(0, rows, some):
                yield opened.get_slice(name)[first : first + some]
            read += rows
        if read != self._total(name):
            raise ValueError(f"{name}: only {read} of {pluralize(self._total(name), 'row')} are in these files")


def write_rows(
    tensors: Mapping[str, torch.Tensor],
    stem: str,
    folder: Path,
    group: ProcessGroup,
    staging: Staging,
    places: Mapping[str, RowRange] | None = None,
) -> None:
    """Write this process's rows to a file. All processes must call it together.

    When `staging` is done, the files of a node are in the `folder` of its first process.

    Args:
        places: needed if rows are not in the order of processes, or will be read from a subset of the files.
    """
    name = f"{stem}{ROWS_MARKER}{group.rank + 1:05}-of-{group.size:05}.safetensors"
    file = Path(group.broadcast_on_node(str(folder))) / name
    metadata = {PLACES_KEY: json.dumps(places)} if places else None

    def write(rows: dict[str, torch.Tensor]) -> None:
        save_file(rows, file, metadata)
        group.barrier_on_node()

    staging.stage(dict(tensors), write)


# Consolidate a sharded checkpoint into a whole model's files piece by piece, without holding all weights in memory.
#
# The result is byte for byte what transformers would save, so its digest does not depend on the number of processes.

MAX_FILE_SIZE = "50GB"
"""Maximum size of a file, the default of `save_pretrained`."""
INDEX_FILE = "model.safetensors.index.json"


def consolidate_weights(rows: ShardedTensors, model: PreTrainedModel, folder: Path, largest: str = MAX_FILE_SIZE) -> None:
    """Write the weights of `model`, which may be on the meta device, in its dtype."""
    named = dict(model.named_parameters())  # tied weights once, as they are saved
    weights = {name: named[name] for name in sorted(named, key=dot_natural_key)}
    split = split_torch_state_dict_into_shards(weights, filename_pattern="model{suffix}.safetensors", max_shard_size=largest)
    for name, names in split.filename_to_tensors.items():
        write_safetensors(folder / name, {weight: weights[weight] for weight in names}, {"format": "pt"}, rows.iter_pieces)
    if split.is_sharded:
        metadata = {"total_parameters": model.num_parameters(), **split.metadata}
        index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
