"""Packing: short examples side by side in rows of one length, so that no compute goes into padding.

Padding was the biggest loss measured on long-tailed data. Positions restart with each example: from that, transformers
builds the mask that keeps neighbours from seeing each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from recipes.training.data.examples import IGNORED, Example


@dataclass(frozen=True)
class Row:
    """One packed row; all three tensors are int64 of shape [sequence_length]."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of items, none longer than `capacity`, in bins: longest first, each into the first bin with room.

    The order is a function of the lengths alone (ties keep their order), so equal data packs equally everywhere.
    """
    bins: list[list[int]] = [[] for _ in lengths]
    # A tree finds that bin in logarithmic time: leaf `leaves + n` is the room of bin n, a node the most room below it.
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


def pack(examples: Sequence[Example], sequence_length: int, padding: int) -> list[Row]:
    """Examples -> rows of exactly `sequence_length` tokens; the rest of a row is `padding`, as an example of its own."""
    bins = first_fit([len(example.tokens) for example in examples], sequence_length)
    return [row_of([examples[index] for index in chosen], sequence_length, padding) for chosen in bins]


def row_of(examples: Sequence[Example], sequence_length: int, padding: int) -> Row:
    """Examples that fit into one row, side by side."""
    tokens = [token for example in examples for token in example.tokens]
    # The first token of an example has no predecessor to be predicted from.
    labels = [label for example in examples for label in (IGNORED, *example.labels[1:])]
    positions = [position for example in examples for position in range(len(example.tokens))]
    rest = sequence_length - len(tokens)
    return Row(
        input_ids=torch.tensor(tokens + [padding] * rest),
        labels=torch.tensor(labels + [IGNORED] * rest),
        position_ids=torch.tensor(positions + list(range(rest))),
    )


def collate(rows: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Rows -> a batch of tensors of shape [batch, sequence_length], and what transformers needs to compute less.

    `logits_to_keep` are the places [places] before a token that is learned in any of the rows, and `shift_labels` what
    follows there, [batch, places]: prompts and padding get no logits, which a large vocabulary makes costly.
    """
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    places, following = learned(batch["labels"])
    return batch | {"logits_to_keep": places, "shift_labels": following}


def learned(labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The places before a token that is learned in any of the rows, and what follows there."""
    following = labels[:, 1:]
    places = (following != IGNORED).any(dim=0).nonzero().squeeze(1)
    return places, following[:, places]
