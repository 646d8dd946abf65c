"""What lies in a folder of the store, as a listing of S3 has it: complete files, and no empty folders."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

UNFINISHED = re.compile(r".*#\d+")
"""What obstore calls a file of a folder that is not complete yet; no listing shows it."""


def files_below(folder: Path) -> Iterator[tuple[Path, int]]:
    """The complete files below a folder, and their sizes."""
    for name, size in directly_in(folder):
        if size is None:
            yield from files_below(folder / name)
        else:
            yield folder / name, size


def directly_below(folder: Path) -> tuple[list[tuple[str, int]], list[str]]:
    """Names and sizes of the complete files in a folder, and names of the folders that have one somewhere below."""
    files, folders = [], []
    for name, size in directly_in(folder):
        if size is not None:
            files.append((name, size))
        elif next(files_below(folder / name), None):
            folders.append(name)
    return files, folders


def directly_in(folder: Path) -> Iterator[tuple[str, int | None]]:
    """Names and sizes of the complete files in a folder; of a folder there, None. No link is followed: behind one may lie
    anything.

    What another deletes meanwhile is not among them, as in a listing of S3.
    """
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as found:
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                yield entry.name, None
            elif entry.is_file(follow_symlinks=False) and not UNFINISHED.fullmatch(entry.name):
                with suppress(FileNotFoundError):
                    yield entry.name, entry.stat(follow_symlinks=False).st_size
