"""What a look at a command's checkpoints folder finds: which files lie there, and which have changed since the look before.

Nothing is read, and nothing is decided here: when a state is made is `recipes.command.snapshot_publisher`.
"""

import errno
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import walk
from pathlib import Path

from recipes.storage.artifact_store import MANIFEST

NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
"""Of what is gone, and of a link that leads nowhere, or to itself."""


@dataclass(frozen=True)
class Stamp:
    """What tells whether a file has changed, without reading it. Times are in nanoseconds."""

    size: int
    modified: int
    inode: int


def ignore(error: PermissionError) -> None:
    """Whoever looks a second time has been told."""


def look(folder: Path, left_out: Callable[[PermissionError], None] = ignore) -> dict[str, Stamp]:
    """All files of a folder that can be published, by their paths in it. No link to a folder is followed.

    Args:
        left_out: told of each file and folder that may not be looked at.

    Raises:
        OSError: the disk does not say what lies there.
    """

    def problem(error: OSError) -> None:
        if isinstance(error, PermissionError):
            left_out(error)
        elif error.errno not in NOT_THERE:
            raise error

    names = (Path(place, name) for place, _, files in walk(folder, onerror=problem) for name in files if name != MANIFEST)
    found = ((path.relative_to(folder).as_posix(), look_at(path, left_out)) for path in names)
    return {path: stamp for path, stamp in found if stamp}


def look_at(path: Path, left_out: Callable[[PermissionError], None] = ignore) -> Stamp | None:
    """None where there is no file, or no longer, or none that may be looked at: a link to itself failed the whole state."""
    try:
        found = path.stat()
    except PermissionError as error:
        left_out(error)
        return None
    except OSError as error:
        if error.errno not in NOT_THERE:
            raise
        return None
    return Stamp(found.st_size, found.st_mtime_ns, found.st_ino) if stat.S_ISREG(found.st_mode) else None


def changed(before: Mapping[str, Stamp], now: Mapping[str, Stamp]) -> frozenset[str]:
    """Files that are new or others since the look before; what went away leaves nothing half written."""
    return frozenset(path for path, stamp in now.items() if before.get(path) != stamp)
