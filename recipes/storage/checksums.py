"""An artifact as a local folder: checksums, and atomic writes into a shared cache."""

import hashlib
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from recipes.contracts.quantities import pluralize
from recipes.storage.buckets import UNFINISHED_UPLOAD
from recipes.storage.manifest import FileRecord, Manifest
from recipes.storage.object_transfer import READ_CHUNK_BYTES

# Atomic writes into a cache that several jobs fill: each writes a temporary file and renames it once it is complete.
#
# A killed process leaves its temporary file, which is removed by a later write to the same folder after a day.

ABANDONED_SECONDS = 24 * 3600
"""Age from which a temporary file is considered abandoned."""
PART_FILE = re.compile(r"\.\d+-[0-9a-f]{16}\.part")


@contextmanager
def write_atomically(target: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `target` when the block succeeds.

    On an error `target` is unchanged.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned_parts(target.parent)
    # A short name, independent of the target's, because file names have a maximum length.
    temporary = target.with_name(f".{os.getpid()}-{secrets.token_hex(8)}.part")
    try:
        with temporary.open("xb") as out:
            yield out
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def remove_abandoned_parts(folder: Path) -> None:
    for path in folder.glob(".*.part"):
        with suppress(FileNotFoundError):  # another process removed or renamed it
            if PART_FILE.fullmatch(path.name) and time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                path.unlink()


# Describe and verify an artifact's files in a local folder.

MANIFEST_FILE = "manifest.json"


def hash_file(path: Path) -> str:
    """SHA-256 of a file, read in chunks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(READ_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def describe_files(folder: Path) -> tuple[FileRecord, ...]:
    """Describe every file below `folder` except its manifest, sorted by name."""
    return tuple(
        FileRecord(path=file.relative_to(folder).as_posix(), sha256=hash_file(file), size=file.stat().st_size)
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name != MANIFEST_FILE
    )


def has_only_listed_files(folder: Path, manifest: Manifest) -> bool:
    """Return whether a folder holds only files that the manifest lists.

    A subfolder with its own manifest is another artifact: a prepared version's splits are below its records.
    """
    listed = {file.path for file in manifest.files}
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not Path(place, name, MANIFEST_FILE).is_file()]
        found = {Path(place, name).relative_to(folder).as_posix() for name in names if not UNFINISHED_UPLOAD.fullmatch(name)}
        if found - listed - {MANIFEST_FILE}:
            return False
    return True


def find_file_corruption(folder: Path, file: FileRecord) -> str | None:
    """Return what is wrong with a local file, as one line, or None."""
    path = folder / file.path
    if not path.is_file():
        return f"{file.path} is missing"
    size = path.stat().st_size
    return find_difference(file, size, hash_file(path) if size == file.size else "")


def find_difference(file: FileRecord, size: int, sha256: str) -> str | None:
    """Return how size or hash differ from the record, as one line, or None."""
    if size != file.size:
        return f"{file.path} has {pluralize(size, 'byte')}, recorded are {file.size:,}"
    if sha256 != file.sha256:
        return f"{file.path} has SHA-256 {sha256}, recorded is {file.sha256}"
    return None
