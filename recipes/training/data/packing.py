"""Packed rows over tokens that stay in their Arrow files: a row is made when it is asked for (row B18).

Which records share a row is a function of their lengths alone, so that a resumed run sees the same rows in the same order.
"""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from recipes.contracts.job import BadConfiguration
from recipes.training.data.examples import IGNORED
from recipes.training.packing import first_fit

TOKEN_BYTES = 4


class PackedRows(Dataset[dict[str, torch.Tensor]]):
    """Rows of `length` tokens; each item is what `recipes.training.packing.Row` holds, bit for bit as `row_of` makes it.

    Raises:
        BadConfiguration: none of the records teaches anything within `length`.
    """

    def __init__(self, table: pa.Table, length: int, padding: int) -> None:
        self._ids, self._masks = table.column("input_ids"), table.column("assistant_mask")
        self._length = length
        self._padding = padding
        whole = table.column("length").to_numpy()
        self._lengths = np.minimum(whole, length)
        kept = np.flatnonzero(learned(self._masks, self._lengths) > 0)
        if not len(kept):
            raise BadConfiguration(f"no answer fits into sequence_length {length}: raise it in the recipe")
        self.num_records = len(kept)
        self.left_out = len(whole) - len(kept)
        self.truncated = int((whole[kept] > length).sum())
        self.num_tokens = int(self._lengths[kept].sum(dtype=np.int64))
        self._addresses = addresses(self._ids)
        self._rows = [kept[chosen] for chosen in first_fit(self._lengths[kept].tolist(), length)]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """In arrays, and not token by token: a model that is small, or fast, would wait for its rows."""
        tokens = np.full(self._length, self._padding, dtype=np.int64)
        labels = np.full(self._length, IGNORED, dtype=np.int64)
        positions = np.empty(self._length, dtype=np.int64)
        first = 0
        for record in self._rows[index].tolist():
            end = first + int(self._lengths[record])
            found = self._ids[record].values[: end - first].to_numpy()
            mask = self._masks[record].values[: end - first].to_numpy(zero_copy_only=False)
            tokens[first:end] = found
            labels[first:end][mask] = found[mask]
            labels[first] = IGNORED  # the first token of an example has no predecessor to be predicted from
            positions[first:end] = np.arange(end - first)
            first = end
        positions[first:] = np.arange(self._length - first)
        arrays = {"input_ids": tokens, "labels": labels, "position_ids": positions}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def place_of(self, index: int) -> Iterator[tuple[int, int]]:
        """Where the tokens of a row lie: addresses, and sizes in bytes. Nothing of them is read."""
        records = self._rows[index]
        return zip(self._addresses[records].tolist(), (self._lengths[records] * TOKEN_BYTES).tolist(), strict=True)


def addresses(tokens: pa.ChunkedArray) -> NDArray[np.int64]:
    """Of the first token of each record."""
    found = [np.zeros(0, dtype=np.int64)]
    for chunk in tokens.chunks:
        values = chunk.values
        buffer = values.buffers()[1]  # none where there is no token
        first = (buffer.address if buffer else 0) + values.offset * TOKEN_BYTES
        found.append(first + chunk.offsets.to_numpy()[:-1].astype(np.int64) * TOKEN_BYTES)
    return np.concatenate(found)


def learned(mask: pa.ChunkedArray, lengths: NDArray[np.int32]) -> NDArray[np.int64]:
    """How many tokens are learned of the first `lengths` of each record; nothing predicts a record's first token."""
    counts = []
    done = 0
    for chunk in mask.chunks:
        here = lengths[done : done + len(chunk)]
        done += len(chunk)
        starts = chunk.offsets.to_numpy()[:-1] - chunk.offsets[0].as_py()
        before = np.cumsum(chunk.flatten().to_numpy(zero_copy_only=False))
        counts.append(before[starts + here - 1] - before[starts])
    return np.concatenate([*counts, np.zeros(0, dtype=np.int64)])
