"""Where raw files come from. Each can be opened, and then read from any position."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from resources.errors import invalid
from resources.ingest.formats import ENDINGS, Format, has_format


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
        return [SourceFile(readable_name(path.name), opener(path))]
    if not path.is_dir():
        raise invalid(f"there is no file or folder {path.name}: check --path")
    found = sorted(file for file in path.rglob("*") if has_format(file.name, format) and not file.is_dir())
    if not found:
        raise invalid(f"folder {path.name} holds no *{ENDINGS[format][0]} file")
    if unread := [file for file in found if not file.is_file()]:
        raise invalid(f"{unread[0].relative_to(path)} is a link to nothing, or no regular file: correct or remove it")
    return [SourceFile(readable_name(file.relative_to(path).as_posix()), opener(file)) for file in found]


def readable_name(name: str) -> str:
    """Raises 400 for a name that is no text, as disks may have them: no manifest can hold it."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise invalid(f"file name {name[:100]!r} is not allowed: rename it, in UTF-8") from None
    return name
