"""Takes the files that a state is made of out of the folder that a command writes to: as links where those can be made.

What lies in the folder is `recipes.command.look`; when it is taken, and whether it is a state, `recipes.command.snapshot_publisher`.
"""

import shutil
from collections.abc import Callable
from contextlib import suppress
from enum import Enum, auto
from os.path import realpath
from pathlib import Path

from recipes.command.look import NOT_THERE, Stamp
from recipes.storage.artifact_store import sha256_of
from recipes.storage.manifest import FileRecord


class Taken(Enum):
    """What became of a file of the folder."""

    LINKED = auto()
    COPIED = auto()
    GONE = auto()


class NoRoom(Exception):
    """A copy beside the running command would take the room that it writes to itself."""


class Taking:
    """Of one folder; what is taken lies beside it.

    Args:
        left_out: told of each file that may not be read.
    """

    def __init__(self, folder: Path, left_out: Callable[[PermissionError], None]) -> None:
        self._folder = folder
        self._left_out = left_out
        self._place = folder.with_name(f".{folder.name}.taken")
        self._hashed: dict[str, tuple[Stamp, str]] = {}
        self._room: int | None = None
        """Bytes that copies may still take; None where the command has ended, and needs none."""

    def begin(self, *, beside_command: bool) -> Path:
        """An empty folder for what is taken."""
        shutil.rmtree(self._place, ignore_errors=True)  # of who was killed: what is copied over a link changes its file
        self._place.mkdir()
        self._room = room_for_copies(self._place) if beside_command else None
        return self._place

    def end(self) -> None:
        shutil.rmtree(self._place, ignore_errors=True)

    def take(self, path: str, as_copy: bool) -> Taken:
        """A link costs nothing, and stays when the command renames over the file. Where none can be made it is a copy.

        That copy was taken for a link that had been written over: each attempt copied one file more, of 100,000 without end.

        Raises:
            NoRoom: beside the running command there is none for a copy.
        """
        source, target = Path(realpath(self._folder / path)), self._place / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if not as_copy:
            with suppress(OSError):  # where it cannot be, such as in another file system, it is copied
                target.hardlink_to(source)
                return Taken.LINKED
        try:
            self._take_room(path, source.stat().st_size)
            shutil.copyfile(source, target)
        except PermissionError as error:
            self._left_out(error)
            return Taken.GONE
        except OSError as error:
            if error.errno not in NOT_THERE:
                raise
            return Taken.GONE
        return Taken.COPIED

    def described(self, path: str, stamp: Stamp | None) -> FileRecord | None:
        """`stamp` is of a link; what was hashed before and has not changed is not read again. None where it may not be."""
        taken = self._place / path
        known = self._hashed.get(path)
        if stamp is None or known is None or known[0] != stamp:
            try:
                sha256 = sha256_of(taken)
            except PermissionError as error:
                self._left_out(PermissionError(error.errno, error.strerror, str(self._folder / path)))
                return None
            if stamp is not None:
                self._hashed[path] = (stamp, sha256)
        else:
            sha256 = known[1]
        return FileRecord(path=path, sha256=sha256, size=taken.stat().st_size)

    def _take_room(self, path: str, size: int) -> None:
        """The copy of a large file filled the disk, and the command's own write failed."""
        if self._room is None:
            return
        self._room -= size
        if self._room < 0:
            raise NoRoom(
                f"for want of space for a copy of {path}: none is needed of a file that is written under another name in the"
                " same folder, and renamed when it is whole"
            )


def room_for_copies(folder: Path) -> int:
    """Bytes that may be taken of a disk that a command writes to: a tenth of it stays free, or nearly all that is left."""
    disk = shutil.disk_usage(folder)
    return max(disk.free - disk.total // 10, disk.free // 100)
