"""What a preparation consists of: ranges of the input, each a unit of work, and where each unit leaves its files."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from recipes.contracts.parameters import PrepareParameters
from recipes.preparation.shuffle_plan import FAN
from recipes.records.disk_partitions import HELD_BYTES, Scratch
from recipes.storage.manifest import FileRecord

RANGE_BYTES = 16 << 20
"""Of input for one unit: small enough that a worker's memory stays low, large enough that its start does not count."""

PART_BYTES = 32 << 20
"""Of prepared data, about, in one output file."""


@dataclass(frozen=True)
class Range:
    """The lines of a file that begin at bytes `start` to before `end`; all of its bytes are in one range of it."""

    file: str
    start: int
    end: int


@dataclass(frozen=True)
class Plan:
    """All that a unit of work is told; the same for all of them."""

    work: Path
    ranges: tuple[Range, ...]
    parameters: PrepareParameters
    part_bytes: int = PART_BYTES
    fan: int = FAN
    held_bytes: int = HELD_BYTES

    def place(self, stage: str, index: int, suffix: str) -> Path:
        """Where a unit of a stage leaves a file."""
        return self.work / stage / f"{index:05}.{suffix}"

    @property
    def scratch(self) -> Scratch:
        """Where what is asked of all records together lies while it is found out."""
        return Scratch(self.work / "scratch", self.held_bytes)


def cut(files: Iterable[FileRecord], range_bytes: int = RANGE_BYTES) -> tuple[Range, ...]:
    """Ranges of `range_bytes`: nothing of a file needs to be here to know them."""
    return tuple(
        Range(file.path, start, min(start + range_bytes, file.size))
        for file in files
        for start in range(0, file.size, range_bytes)
    )


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """A path to write to, which gets the name `path` once it is whole: a unit that was killed has no file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    yield part
    part.replace(path)
