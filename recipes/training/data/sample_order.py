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
"""Row number in the unused positions at the end of a step that cannot be divided evenly among processes."""
NO_ROWS = torch.empty(0, dtype=torch.int64)
IDS_PER_BLOCK = 1 << 16
SAMPLES_SEEN = "samples_seen"
"""Manifest fact of a checkpoint: number of samples its weights were trained on."""


@dataclass(frozen=True)
class SampleOrder:
    """An endless sequence of samples: each epoch in its own random order, without skipped positions.

    `skipped` are half-open ranges of positions, counted before skipping. Their rows are left out of later epochs too, unless
    they are more than half of all rows: otherwise a row that makes a run diverge did so once per epoch, until the run
    reached its limit of recoveries.
    """

    rows: int
    seed: int
    skipped: tuple[tuple[int, int], ...] = ()

    def positions(self, first: int, stop: int) -> tuple[int, int]:
        """Return the range of positions that samples `first` to `stop` (exclusive) came from."""
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
        """Yield the row of each sample, without end."""
        for epoch in count_up():
            order = self._order(epoch)
            if self.skipped and self._count(epoch) < self.rows:
                order = order[self._kept_mask(epoch)]
            for first in range(0, len(order), IDS_PER_BLOCK):  # Python integers take four times the memory of torch's
                yield from order[first : first + IDS_PER_BLOCK].tolist()

    def _order(self, epoch: int) -> torch.Tensor:
        return torch.randperm(self.rows, generator=torch.Generator().manual_seed(self.seed + epoch))

    def _kept_mask(self, epoch: int) -> torch.Tensor:
        """Return which positions of an epoch's order are samples."""
        kept = torch.isin(self._order(epoch), self._skipped_before(epoch), invert=True)
        kept[self._skipped_positions.get(epoch, [])] = False
        return kept

    def _count(self, epoch: int) -> int:
        """Return the number of samples in an epoch."""
        if epoch in self._skipped_positions:
            return int(self._kept_mask(epoch).sum())
        return self.rows - len(self._skipped_before(epoch))

    def _skipped_before(self, epoch: int) -> torch.Tensor:
        """Return the rows skipped in earlier epochs."""
        found = [rows for before, rows in self._skipped_rows.items() if before < epoch]
        rows: torch.Tensor = torch.unique(torch.cat(found)) if found else NO_ROWS  # type: ignore[no-untyped-call]
        return rows if 2 * len(rows) <= self.rows else NO_ROWS

    @cached_property
    def _skipped_positions(self) -> Mapping[int, Sequence[int]]:
        """Skipped positions in the order of each epoch, by epoch."""
        found: dict[int, list[int]] = {}
        for position in (position for first, stop in self.skipped for position in range(first, stop)):
            epoch, place = divmod(position, self.rows)
            found.setdefault(epoch, []).append(place)
        return found

    @cached_property
    def _skipped_rows(self) -> Mapping[int, torch.Tensor]:
        """The rows at the skipped positions, by epoch."""
        return {epoch: self._order(epoch)[places] for epoch, places in self._skipped_positions.items()}


class RunSamples(Sampler[int]):
    """All samples of a run as one epoch: the trainer's position is their number."""

    def __init__(self, order: SampleOrder, per_step: int, steps: int) -> None:
        self.order = order
        self.per_step = per_step
        self.steps = steps

    def __len__(self) -> int:
        return self.per_step * self.steps

    def __iter__(self) -> Iterator[int]:
        return islice(self.order.ids(), len(self))

    def count_seen(self, step: int) -> int:
        """Return how many samples the weights after `step` were trained on."""
        return step * self.per_step

    def position_after(self, step: int) -> dict[str, int]:
        """Return epoch and batch index of the next sample, for readers of a manifest."""
        position, _ = self.order.positions(self.count_seen(step), self.count_seen(step) + 1)
        epoch, place = divmod(position, self.order.rows)
        return {"epoch": epoch, "batch_index": place // self.per_step}

    def step_positions(self, first: int, last: int) -> tuple[int, int]:
        """Return the range of positions whose samples steps `first` to `last` (inclusive) used."""
        return self.order.positions(self.count_seen(first - 1), self.count_seen(last))


class ProcessSampler(Sampler[int]):
    """Yield each micro-batch once per process of a model-parallel group.

    Accelerate deals them out in turn. A step has `places` rows; if these are more than its samples, the last ones are
    `NO_ROW`.
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
    """The rows of a split, with None for `NO_ROW`."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return None if index == NO_ROW else self.rows[index]
