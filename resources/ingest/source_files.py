"""Where raw files come from. Each can be opened, and then read from any position."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from recipes.contracts.dataset_formats import ENDINGS, Format, has_format
from resources.errors import invalid

FileState = tuple[int, int, int] | None


def unchanging_state() -> FileState:
    """Of a file that nobody else can write to."""
    return None


@dataclass(frozen=True)
class SourceFile:
    """A raw file: `path` is relative to the dataset's source. `state` is another one once somebody has written to it.

    `origin` is where what it holds can be had again, of one that was made for us; it stands in the version's lineage.
    """

    path: str
    open: Callable[[], AbstractContextManager[BinaryIO]]
    state: Callable[[], FileState] = unchanging_state
    origin: str | None = None

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


def local_file(name: str, path: Path) -> SourceFile:
    """A file of this machine, which may be gone, or another one, once it is read."""

    def opened() -> BinaryIO:
        try:
            return path.open("rb")
        except OSError as error:
            raise invalid(f"{name} cannot be read ({error.strerror}): put it back, or let this server read it") from None

    def state() -> FileState:
        try:
            found = path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns

    return SourceFile(checked_file_name(name), opened, state)


def local_files(path: Path, format: Format) -> list[SourceFile]:
    """The files that `--path` means: one file, whatever it is called, or all of that format in a folder."""
    if path.is_file():
        return [local_file(path.name, path)]
    if not path.is_dir():
        raise invalid(f"there is no file or folder {path.name}: check --path")
    found = sorted(file for file in path.rglob("*") if has_format(file.name, format) and not file.is_dir())
    if not found:
        raise invalid(f"folder {path.name} holds no *{ENDINGS[format][0]} file")
    if unread := [file for file in found if not file.is_file()]:
        raise invalid(f"{unread[0].relative_to(path)} is a link to nothing, or no regular file: correct or remove it")
    return [local_file(file.relative_to(path).as_posix(), file) for file in found]


def checked_file_name(name: str) -> str:
    """Raises 400 for a name that is no text, as disks may have them: no manifest can hold it."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise invalid(f"file name {name[:100]!r} is not allowed: rename it, in UTF-8") from None
    return name
