"""An artifact as a folder of this machine: what its files are, and whether they are what its manifest says."""

import hashlib
import os
from pathlib import Path

from recipes.counted import counted
from recipes.folder_listing import UNFINISHED
from recipes.storage.manifest import FileRecord, Manifest
from recipes.storage.object_transfer import CHUNK

MANIFEST = "manifest.json"


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, read in chunks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def describe(folder: Path) -> tuple[FileRecord, ...]:
    """Every file below `folder` but its manifest, in the order of their names."""
    return tuple(
        FileRecord(path=file.relative_to(folder).as_posix(), sha256=sha256_of(file), size=file.stat().st_size)
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name != MANIFEST
    )


def lies_alone(folder: Path, manifest: Manifest) -> bool:
    """Whether nothing that its manifest does not list stands among an artifact's files.

    A folder with a manifest of its own is another artifact: a prepared version's splits lie below its records.
    """
    listed = {file.path for file in manifest.files}
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not Path(place, name, MANIFEST).is_file()]
        found = {Path(place, name).relative_to(folder).as_posix() for name in names if not UNFINISHED.fullmatch(name)}
        if found - listed - {MANIFEST}:
            return False
    return True


def what_is_broken(folder: Path, file: FileRecord) -> str | None:
    """What is wrong with a file of a local folder, as one line that begins with its name; None when all is well."""
    path = folder / file.path
    if not path.is_file():
        return f"{file.path} is missing"
    size = path.stat().st_size
    return difference(file, size, sha256_of(path) if size == file.size else "")


def difference(file: FileRecord, size: int, sha256: str) -> str | None:
    """What a file that was found differs in from what is recorded, as one line that begins with its name; None: nothing."""
    if size != file.size:
        return f"{file.path} has {counted(size, 'byte')}, recorded are {file.size:,}"
    if sha256 != file.sha256:
        return f"{file.path} has SHA-256 {sha256}, recorded is {file.sha256}"
    return None
