"""Buckets in a folder, listed as on S3, with detection of lost mounts."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from recipes.contracts.job import StoreAddress
from recipes.storage.locations import local_store_root

# What lies in a folder of the store, as a listing of S3 has it: complete files, and no empty folders.

UNFINISHED_UPLOAD = re.compile(r".*#\d+")
"""What obstore calls a file of a folder that is not complete yet; no listing shows it."""


def walk_files(folder: Path) -> Iterator[tuple[Path, int]]:
    """The complete files below a folder, and their sizes."""
    for name, size in scan_folder(folder):
        if size is None:
            yield from walk_files(folder / name)
        else:
            yield folder / name, size


def list_folder(folder: Path) -> tuple[list[tuple[str, int]], list[str]]:
    """Names and sizes of the complete files in a folder, and names of the folders that have one somewhere below."""
    files, folders = [], []
    for name, size in scan_folder(folder):
        if size is not None:
            files.append((name, size))
        elif next(walk_files(folder / name), None):
            folders.append(name)
    return files, folders


def scan_folder(folder: Path) -> Iterator[tuple[str, int | None]]:
    """Names and sizes of the complete files in a folder; of a folder there, None. No link is followed: behind one may lie
    anything.

    What another deletes meanwhile is not among them, as in a listing of S3.
    """
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as found:
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                yield entry.name, None
            elif entry.is_file(follow_symlinks=False) and not UNFINISHED_UPLOAD.fullmatch(entry.name):
                with suppress(FileNotFoundError):
                    yield entry.name, entry.stat(follow_symlinks=False).st_size


# A store that is a folder: a bucket is made once, and one that is not there later is away, and not empty.
#
# A network folder that is not mounted is an empty one, or none. It read as an empty store: a training that was taken up
# at such a moment began anew.

BUCKET_MARKER = ".bucket"
"""The mark in a bucket's folder, where no key leads. A put that was on its way as the folder went away makes another one of
its name, as the library does: that one has none.
"""


def mount_marker(root: Path, name: str) -> Path:
    """What says beside the root that a bucket was made in it."""
    return root.with_name(f".{root.name}-made") / name


def make_bucket_folder(root: Path, name: str) -> Path:
    """The folder of a bucket, made and marked where it never was. Raises OSError."""
    folder, mark = root / name, mount_marker(root, name)
    if not mark.exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / BUCKET_MARKER).touch()
        mark.parent.mkdir(exist_ok=True)
        mark.touch()
    return folder


def find_unmounted_bucket(address: StoreAddress) -> Path | None:
    """The mark of a bucket that was made and is not there: it is not mounted, or was moved away."""
    root = local_store_root(address)
    if root is None:
        return None
    names = (name for name in address.buckets.values() if mount_marker(root, name).exists() and not is_mounted(root / name))
    return next((mount_marker(root, name) for name in names), None)


def is_mounted(bucket: Path) -> bool:
    """False too where a network folder says that it does not answer, which it does in many ways."""
    try:
        return (bucket / BUCKET_MARKER).exists()
    except OSError:
        return False
