"""Raw files of a dataset's source, which can be read from any position."""

import shlex
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from recipes.contracts.dataset_formats import ENDINGS, Format, MixedSplits, SelectedFiles, select_files, walk_files
from resources.errors import invalid
from resources.ingest.problems import MAX_SHOWN

FileState = tuple[int, int, int] | None


def unchanging_state() -> FileState:
    """Return the state of a file that never changes."""
    return None


@dataclass(frozen=True)
class SourceFile:
    """A raw file: `path` is relative to the dataset's source.

    `state` changes whenever the file is written to. `origin` is an address from which generated contents can be read
    again; it is recorded in the version's lineage.
    """

    path: str
    open: Callable[[], AbstractContextManager[BinaryIO]]
    state: Callable[[], FileState] = unchanging_state
    origin: str | None = None

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


def local_file(name: str, path: Path) -> SourceFile:
    """Return a local file, which may be deleted or replaced before it is read."""

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


class FolderFiles(list[SourceFile]):
    """The files of a folder that are read.

    `skipped` are the paths of others that look like raw files.
    """

    def __init__(self, files: Iterable[SourceFile], skipped: Sequence[str] = ()) -> None:
        super().__init__(files)
        self.skipped = tuple(skipped)


def local_files(path: Path, format: Format) -> list[SourceFile]:
    """Return the files for `--path`: one file, or all of the format in a folder."""
    if path.is_file():
        return [local_file(path.name, path)]
    if not path.is_dir():
        raise invalid(f"there is no file or folder {path.name}: check --path")
    selected = select_source_files(walk_files(path), format, path.name)
    if unread := [name for name in selected.chosen if not (path / name).is_file()]:
        raise invalid(f"{unread[0]} is a link to nothing, or no regular file: correct or remove it")
    return FolderFiles((local_file(name, path / name) for name in selected.chosen), selected.skipped)


def select_source_files(paths: Iterable[str], format: Format, folder: str) -> SelectedFiles:
    """Return the files of a folder that are read.

    Raises:
        HanzoError: 400 if there are none, or they are of several splits.
    """
    try:
        selected = select_files(paths, format)
    except MixedSplits as mixed:
        command = shlex.join(["hanzo-ml", "dataset", "create", "--name", "NAME", "--path", f"{folder}/{mixed.first}"])
        raise invalid(f"folder {folder} is not a dataset: {mixed.advice(command)}") from None
    if not selected.chosen:
        skipped = f" that is read ({', '.join(selected.skipped[:MAX_SHOWN])} is not)" if selected.skipped else ""
        raise invalid(f"folder {folder} holds no *{ENDINGS[format][0]} file{skipped}")
    return selected


def checked_file_name(name: str) -> str:
    """Check a file name.

    Raises:
        HanzoError: 400 if it is not valid Unicode, which no manifest can contain.
    """
    try:
        name.encode()
    except UnicodeEncodeError:
        raise invalid(f"file name {name[:100]!r} is not allowed: rename it, in UTF-8") from None
    return name
