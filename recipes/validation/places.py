"""Records that stay in their files: each is read again by its number, for 20 bytes in memory however long it is."""

import os
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import msgspec


class Places:
    """The records of files with one JSON object a line, counted from 0 over all files; lines that hold nothing are none."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._paths = files
        self._files = ExitStack()
        self._open: list[int] = []
        self._starts, self._lengths, self._of = array("q"), array("q"), array("i")
        self._decode = msgspec.json.Decoder(dict[str, Any]).decode
        for number, path in enumerate(files):
            start = 0
            with path.open("rb") as lines:
                for line in lines:
                    if line.strip():
                        self._starts.append(start)
                        self._lengths.append(len(line))
                        self._of.append(number)
                    start += len(line)

    def __enter__(self) -> Self:
        self._open = [self._files.enter_context(path.open("rb")).fileno() for path in self._paths]
        return self

    def __exit__(self, *error: object) -> None:
        self._files.close()

    def __len__(self) -> int:
        return len(self._starts)

    def read(self, number: int) -> dict[str, Any]:
        return self._decode(os.pread(self._open[self._of[number]], self._lengths[number], self._starts[number]))
