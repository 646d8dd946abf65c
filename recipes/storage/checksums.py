"""An artifact as a local folder - checksums, and atomic writes into a shared cache."""

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

# Files of a cache that several jobs fill at once: each writes beside the place, and puts what is whole there.
#
# What was killed meanwhile leaves its own part behind, which goes when somebody fetches into the same folder a day later.

ABANDONED_SECONDS = 24 * 3600
"""Of a part that nobody wrote to for so long, nobody will."""
PART_FILE = re.compile(r"\.\d+-[0-9a-f]{16}\.part")


@contextmanager
def write_atomically(target: Path) -> Iterator[BinaryIO]:
    """A file to write what `target` shall be: it is there when the block ends, and as it was when the block fails."""
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned_parts(target.parent)
    # Short, whatever the target is called: a name has its limit.
    temporary = target.with_name(f".{os.getpid()}-{secrets.token_hex(8)}.part")
    try:
        with temporary.open("xb") as out:
            yield out
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def remove_abandoned_parts(folder: Path) -> None:
    for path in folder.glob(".*.part"):
        with suppress(FileNotFoundError):  # another was faster, or has just put it in its place
            if PART_FILE.fullmatch(path.name) and time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                path.unlink()


# An artifact as a folder of this machine: what its files are, and whether they are what its manifest says.

MANIFEST_FILE = "manifest.json"


def hash_file(path: Path) -> str:
    """SHA-256 of a file, read in chunks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(READ_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def describe_files(folder: Path) -> tuple[FileRecord, ...]:
    """Every file below `folder` but its manifest, in the order of their names."""
    return tuple(
        FileRecord(path=file.relative_to(folder).as_posix(), sha256=hash_file(file), size=file.stat().st_size)
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name != MANIFEST_FILE
    )


def has_only_listed_files(folder: Path, manifest: Manifest) -> bool:
    """Whether nothing that its manifest does not list stands among an artifact's files.

    A folder with a manifest of its own is another artifact: a prepared version's splits lie below its records.
    """
    listed = {file.path for file in manifest.files}
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not Path(place, name, MANIFEST_FILE).is_file()]
        found = {Path(place, name).relative_to(folder).as_posix() for name in names if not UNFINISHED_UPLOAD.fullmatch(name)}
        if found - listed - {MANIFEST_FILE}:
            return False
    return True


def find_file_corruption(folder: Path, file: FileRecord) -> str | None:
    """What is wrong with a file of a local folder, as one line that begins with its name; None when all is well."""
    path = folder / file.path
    if not path.is_file():
        return f"{file.path} is missing"
    size = path.stat().st_size
    return find_difference(file, size, hash_file(path) if size == file.size else "")


def find_difference(file: FileRecord, size: int, sha256: str) -> str | None:
    """What a file that was found differs in from what is recorded, as one line that begins with its name; None: nothing."""
    if size != file.size:
        return f"{file.path} has {pluralize(size, 'byte')}, recorded are {file.size:,}"
    if sha256 != file.sha256:
        return f"{file.path} has SHA-256 {sha256}, recorded is {file.sha256}"
    return None
