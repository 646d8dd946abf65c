"""Pack short examples side by side into rows of one length."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from recipes.contracts.job import BadConfiguration
from recipes.training.data.examples import IGNORED_LABEL, Example

# Packing places short examples side by side in rows of one length, so that no compute is wasted on padding.
#
# Padding was the largest loss measured on long-tailed data. Positions restart at each example; transformers derives from
# them the mask that separates the examples.


@dataclass(frozen=True)
class PackedRow:
    """One packed row; all three tensors are int64 of shape [sequence_length]."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack items into bins of `capacity` by first-fit decreasing. Returns the items' indices per bin.

    No item may be longer than `capacity`. The result depends on the lengths alone (ties keep their order), so that equal
    data is packed equally everywhere.
    """
    bins: list[list[int]] = [[] for _ in lengths]
    # A tree finds the first bin with room in O(log n): leaf `leaves + n` is the room of bin n, a node the maximum below it.
    leaves = 1 << len(lengths).bit_length()
    room = [capacity] * (2 * leaves)
    for item in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        node = 1
        while node < leaves:
            node = 2 * node if room[2 * node] >= lengths[item] else 2 * node + 1
        bins[node - leaves].append(item)
        room[node] -= lengths[item]
        while node := node // 2:
            room[node] = max(room[2 * node], room[2 * node + 1])
    return [chosen for chosen in bins if chosen]


def pack_examples(examples: Sequence[Example], sequence_length: int, padding: int) -> list[PackedRow]:
    """Pack examples into rows of exactly `sequence_length` tokens.

    Padding counts as an example of its own.
    """
    bins = first_fit([len(example.tokens) for example in examples], sequence_length)
    return [pack_row([examples[index] for index in chosen], sequence_length, padding) for chosen in bins]


def pack_row(examples: Sequence[Example], sequence_length: int, padding: int) -> PackedRow:
    """Concatenate examples that fit into one row."""
    tokens = [token for example in examples for token in example.tokens]
    # The first token of an example has no predecessor to be predicted from.
    labels = [label for example in examples for label in (IGNORED_LABEL, *example.labels[1:])]
    positions = [position for example in examples for position in range(len(example.tokens))]
    rest = sequence_length - len(tokens)
    return PackedRow(
        input_ids=torch.tensor(tokens + [padding] * rest),
        labels=torch.tensor(labels + [IGNORED_LABEL] * rest),
        position_ids=torch.tensor(positions + list(range(rest))),
    )


def collate(rows: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Stack rows into tensors [batch, sequence_length], and add the positions that need logits.

    `logits_to_keep` [places] are the positions before a learned token in any of the rows, and `shift_labels` [batch, places]
    the tokens that follow. Prompts and padding get no logits, which a large vocabulary makes expensive.
    """
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    places, next_tokens = find_learned_positions(batch["labels"])
    return batch | {"logits_to_keep": places, "shift_labels": next_tokens}


def find_learned_positions(labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions before a learned token in any row, and their next tokens."""
    next_tokens = labels[:, 1:]
    places = (next_tokens != IGNORED_LABEL).any(dim=0).nonzero().squeeze(1)
    return places, next_tokens[:, places]


# Packed rows over tokens that stay in their memory-mapped Arrow files; a row is built when it is requested.
#
# The assignment of records to rows depends on their lengths alone, so that a resumed run sees the same rows in the same
# order.

TOKEN_BYTES = 4


class PackedRows(Dataset[dict[str, torch.Tensor]]):
    """Rows of `length` tokens; each item equals what `pack_row` returns, bit for bit.

    Raises:
        BadConfiguration: no record has a token to learn within `length`.
    """

    def __init__(self, table: pa.Table, length: int, padding: int) -> None:
        self._ids, self._masks = table.column("input_ids"), table.column("assistant_mask")
        self._length = length
        self._padding = padding
        whole = table.column("length").to_numpy()
        self._lengths = np.minimum(whole, length)
        kept = np.flatnonzero(count_learned_tokens(self._masks, self._lengths) > 0)
        if not len(kept):
            raise BadConfiguration(f"no answer fits into sequence_length {length}: raise it in the recipe")
        self.num_records = len(kept)
        self.num_left_out = len(whole) - len(kept)
        self.num_truncated = int((whole[kept] > length).sum())
        self.num_tokens = int(self._lengths[kept].sum(dtype=np.int64))
        self._addresses = token_addresses(self._ids)
        self._rows = [kept[chosen] for chosen in first_fit(self._lengths[kept].tolist(), length)]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Build a row from arrays.

        Token by token it would be too slow for a small or fast model.
        """
        tokens = np.full(self._length, self._padding, dtype=np.int64)
        labels = np.full(self._length, IGNORED_LABEL, dtype=np.int64)
        positions = np.empty(self._length, dtype=np.int64)
        first = 0
        for record in self._rows[index].tolist():
            end = first + int(self._lengths[record])
            found = self._ids[record].values[: end - first].to_numpy()
            mask = self._masks[record].values[: end - first].to_numpy(zero_copy_only=False)
            tokens[first:end] = found
            labels[first:end][mask] = found[mask]
            labels[first] = IGNORED_LABEL  # the first token of an example has no predecessor to be predicted from
            positions[first:end] = np.arange(end - first)
            first = end
        positions[first:] = np.arange(self._length - first)
        arrays = {"input_ids": tokens, "labels": labels, "position_ids": positions}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def memory_ranges(self, index: int) -> Iterator[tuple[int, int]]:
        """Return addresses and sizes in bytes of a row's tokens, without reading them."""
        records = self._rows[index]
        return zip(self._addresses[records].tolist(), (self._lengths[records] * TOKEN_BYTES).tolist(), strict=True)


def token_addresses(tokens: pa.ChunkedArray) -> NDArray[np.int64]:
    """Return the memory address of each record's first token."""
    found = [np.zeros(0, dtype=np.int64)]
    for chunk in tokens.chunks:
        values = chunk.values
        buffer = values.buffers()[1]  # none where there is no token
        first = (buffer.address if buffer else 0) + values.offset * TOKEN_BYTES
        found.append(first + chunk.offsets.to_numpy()[:-1].astype(np.int64) * TOKEN_BYTES)
    return np.concatenate(found)


def count_learned_tokens(mask: pa.ChunkedArray, lengths: NDArray[np.int32]) -> NDArray[np.int64]:
    """Count learned tokens in the first `lengths` of each record.

    A record's first token is never predicted.
    """
    counts = []
    done = 0
    for chunk in mask.chunks:
        here = lengths[done : done + len(chunk)]
        done += len(chunk)
        starts = chunk.offsets.to_numpy()[:-1] - chunk.offsets[0].as_py()
        before = np.cumsum(chunk.flatten().to_numpy(zero_copy_only=False))
        counts.append(before[starts + here - 1] - before[starts])
    return np.concatenate([*counts, np.zeros(0, dtype=np.int64)])
