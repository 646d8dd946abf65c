"""The order in which a run sees its samples: a function of seed and position alone, not of micro-batch or process count.

The place in it is a number of samples, which a checkpoint states; so a run that goes on with another micro-batch, or on
other processes, with the same effective batch, neither skips nor repeats one.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler

NO_ROW = -1
"""In the place of a row: the processes cannot share the rows of a step evenly, and this is one of its last places."""
BLOCK = 1 << 16
SAMPLES_SEEN = "samples_seen"
"""The fact in a checkpoint's manifest: how many samples its weights were trained on."""


@dataclass(frozen=True)
class SampleOrder:
    """Epoch after epoch, each in an order of its own, without what is skipped.

    `skipped` are ranges of positions before anything was skipped; the second number of each is not included.
    """

    rows: int
    seed: int
    skipped: tuple[tuple[int, int], ...] = ()

    def positions(self, first: int, stop: int) -> tuple[int, int]:
        """The range of positions from which samples `first` up to `stop` of the run came."""
        return self._position(first), self._position(stop - 1) + 1

    def _position(self, sample: int) -> int:
        position = sample
        for first, stop in merged(self.skipped):
            if first <= position:
                position += stop - first
        return position

    def ids(self) -> Iterator[int]:
        """Without end: the row of each sample."""
        skipped = {position for first, stop in self.skipped for position in range(first, stop)}
        epoch = 0
        while True:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            order = torch.randperm(self.rows, generator=generator)
            for first in range(0, self.rows, BLOCK):  # numbers of Python take four times as much memory as those of torch
                for place, row in enumerate(order[first : first + BLOCK].tolist(), first):
                    if epoch * self.rows + place not in skipped:
                        yield row
            epoch += 1


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same positions as ranges that do not touch, in order."""
    found: list[tuple[int, int]] = []
    for first, stop in sorted(ranges):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((first, stop))
    return found


class SamplesOfRun(Sampler[int]):
    """All samples that a run sees, as if they were one epoch: the trainer finds its place by their number."""

    def __init__(self, order: SampleOrder, per_step: int, steps: int) -> None:
        self.order = order
        self.per_step = per_step
        self.steps = steps

    def __len__(self) -> int:
        return self.per_step * self.steps

    def __iter__(self) -> Iterator[int]:
        return islice(self.order.ids(), len(self))

    def seen(self, step: int) -> int:
        """How many samples the weights after `step` were trained on."""
        return step * self.per_step

    def place_after(self, step: int) -> dict[str, int]:
        """For people who look into a checkpoint: in which epoch the next sample is, and after how many batches of that."""
        position, _ = self.order.positions(self.seen(step), self.seen(step) + 1)
        epoch, place = divmod(position, self.order.rows)
        return {"epoch": epoch, "batch_index": place // self.per_step}

    def positions_of_steps(self, first: int, last: int) -> tuple[int, int]:
        """The range of positions from which steps `first` to `last`, both included, took their samples."""
        return self.order.positions(self.seen(first - 1), self.seen(last))


class OncePerProcess(Sampler[int]):
    """Each micro-batch as often as there are processes that compute it together: the library gives each process the next.

    A step has `places`, of which the last ones have no row where they are more than its samples.
    """

    def __init__(self, samples: SamplesOfRun, places: int, batch: int, processes: int) -> None:
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


class RowsOrNone(Dataset[Any]):
    """The rows of a split, and None in the place of `NO_ROW`."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return None if index == NO_ROW else self.rows[index]
