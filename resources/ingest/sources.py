"""Where raw files come from. Each can be opened, and then read from any position."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from resources.errors import invalid
from resources.ingest.formats import Format, suffixes


@dataclass(frozen=True)
class SourceFile:
    """A raw file: `path` is relative to the dataset's source."""

    path: str
    open: Callable[[], AbstractContextManager[BinaryIO]]

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


def opener(path: Path) -> Callable[[], BinaryIO]:
    return lambda: path.open("rb")


def local_files(path: Path, format: Format) -> list[SourceFile]:
    """The files that `--path` means: one file, whatever it is called, or all of that format in a folder."""
    if path.is_file():
        return [SourceFile(path.name, opener(path))]
    if not path.is_dir():
        raise invalid(f"there is no file or folder {path.name}: check --path")
    endings = suffixes(format)
    found = sorted(file for file in path.rglob("*") if file.name.endswith(endings) and file.is_file())
    if not found:
        raise invalid(f"folder {path.name} holds no *{endings[0]} file")
    return [SourceFile(file.relative_to(path).as_posix(), opener(file)) for file in found]
