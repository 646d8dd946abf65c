"""The order in which a run sees its samples, independent of process count."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count as count_up
from itertools import islice
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler

NO_ROW = -1
"""In the place of a row: the processes cannot share the rows of a step evenly, and this is one of its last places."""
NO_ROWS = torch.empty(0, dtype=torch.int64)
IDS_PER_BLOCK = 1 << 16
SAMPLES_SEEN = "samples_seen"
"""The fact in a checkpoint's manifest: how many samples its weights were trained on."""


@dataclass(frozen=True)
class SampleOrder:
    """Epoch after epoch, each in an order of its own, without what is skipped.

    `skipped` are ranges of positions before anything was skipped; the second number of each is not included. Their rows are
    left out of later epochs too, unless they are more than half of all: a row that spoils a run did so once an epoch, until
    it had been healed often enough.
    """

    rows: int
    seed: int
    skipped: tuple[tuple[int, int], ...] = ()

    def positions(self, first: int, stop: int) -> tuple[int, int]:
        """The range of positions from which samples `first` up to `stop` of the run came."""
        return self._position(first), self._position(stop - 1) + 1

    def _position(self, sample: int) -> int:
        if not self.skipped:
            return sample
        epoch = 0
        while sample >= (count := self._count(epoch)):
            sample, epoch = sample - count, epoch + 1
        place = sample if count == self.rows else int(self._kept_mask(epoch).nonzero()[sample])
        return epoch * self.rows + place

    def ids(self) -> Iterator[int]:
        """Without end: the row of each sample."""
        for epoch in count_up():
            order = self._order(epoch)
            if self.skipped and self._count(epoch) < self.rows:
                order = order[self._kept_mask(epoch)]
            for first in range(
                0, len(order), IDS_PER_BLOCK
            ):  # numbers of Python take four times as much memory as those of torch
                yield from order[first : first + IDS_PER_BLOCK].tolist()

    def _order(self, epoch: int) -> torch.Tensor:
        return torch.randperm(self.rows, generator=torch.Generator().manual_seed(self.seed + epoch))

    def _kept_mask(self, epoch: int) -> torch.Tensor:
        """Of each place in an epoch's order, whether its row is a sample."""
        kept = torch.isin(self._order(epoch), self._skipped_before(epoch), invert=True)
        kept[self._skipped_positions.get(epoch, [])] = False
        return kept

    def _count(self, epoch: int) -> int:
        """How many samples an epoch has."""
        if epoch in self._skipped_positions:
            return int(self._kept_mask(epoch).sum())
        return self.rows - len(self._skipped_before(epoch))

    def _skipped_before(self, epoch: int) -> torch.Tensor:
        """The rows that were skipped in an epoch before."""
        found = [rows for before, rows in self._skipped_rows.items() if before < epoch]
        rows: torch.Tensor = torch.unique(torch.cat(found)) if found else NO_ROWS  # type: ignore[no-untyped-call]
        return rows if 2 * len(rows) <= self.rows else NO_ROWS

    @cached_property
    def _skipped_positions(self) -> Mapping[int, Sequence[int]]:
        """Epoch -> the places in its order that are skipped."""
        found: dict[int, list[int]] = {}
        for position in (position for first, stop in self.skipped for position in range(first, stop)):
            epoch, place = divmod(position, self.rows)
            found.setdefault(epoch, []).append(place)
        return found

    @cached_property
    def _skipped_rows(self) -> Mapping[int, torch.Tensor]:
        """Epoch -> the rows in those places."""
        return {epoch: self._order(epoch)[places] for epoch, places in self._skipped_positions.items()}


class RunSamples(Sampler[int]):
    """All samples that a run sees, as if they were one epoch: the trainer finds its place by their number."""

    def __init__(self, order: SampleOrder, per_step: int, steps: int) -> None:
        self.order = order
        self.per_step = per_step
        self.steps = steps

    def __len__(self) -> int:
        return self.per_step * self.steps

    def __iter__(self) -> Iterator[int]:
        return islice(self.order.ids(), len(self))

    def count_seen(self, step: int) -> int:
        """How many samples the weights after `step` were trained on."""
        return step * self.per_step

    def position_after(self, step: int) -> dict[str, int]:
        """For people who look into a checkpoint: in which epoch the next sample is, and after how many batches of that."""
        position, _ = self.order.positions(self.count_seen(step), self.count_seen(step) + 1)
        epoch, place = divmod(position, self.order.rows)
        return {"epoch": epoch, "batch_index": place // self.per_step}

    def step_positions(self, first: int, last: int) -> tuple[int, int]:
        """The range of positions from which steps `first` to `last`, both included, took their samples."""
        return self.order.positions(self.count_seen(first - 1), self.count_seen(last))


class ProcessSampler(Sampler[int]):
    """Each micro-batch as often as there are processes that compute it together: the library gives each process the next.

    A step has `places`, of which the last ones have no row where they are more than its samples.
    """

    def __init__(self, samples: RunSamples, places: int, batch: int, processes: int) -> None:
        self.samples = samples
        self.places = places
        self.batch = batch
        self.processes = processes

    def __len__(self) -> int:
        return self.places * self.samples.steps * self.processes

    def __iter__(self) -> Iterator[int]:
        samples = iter(self.samples)
        empty = [NO_ROW] * (self.places - self.samples.per_step)
        for _ in range(self.samples.steps):
            places = [*islice(samples, self.samples.per_step), *empty]
            for first in range(0, self.places, self.batch):
                yield from places[first : first + self.batch] * self.processes


class OptionalRows(Dataset[Any]):
    """The rows of a split, and None in the place of `NO_ROW`."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return None if index == NO_ROW else self.rows[index]
