"""Link or copy the files of the checkpoints folder into a snapshot."""

import shutil
from collections.abc import Callable
from contextlib import suppress
from enum import Enum, auto
from os.path import realpath
from pathlib import Path

from recipes.command.folder_scan import MISSING_FILE_ERRNOS, FileStamp
from recipes.storage.artifact_store import hash_file
from recipes.storage.folder_tree import FILE_MODE
from recipes.storage.manifest import FileRecord
from recipes.storage.object_names import object_name

# Takes the files that a state is made of out of the folder that a command writes to: as links where those can be made.
#
# When files are taken, and whether they make a state, is decided in `recipes.command.snapshot_publisher`.


class CopyResult(Enum):
    """What became of a file of the folder."""

    LINKED = auto()
    COPIED = auto()
    GONE = auto()


class NoSpaceForCopy(Exception):
    """A copy beside the running command would take the room that it writes to itself."""


class SnapshotCopy:
    """Of one folder; what is taken lies beside it.

    Args:
        left_out: told of each file that may not be read.
    """

    def __init__(self, folder: Path, on_unreadable: Callable[[OSError], None]) -> None:
        self._folder = folder
        self._on_unreadable = on_unreadable
        self._snapshot_folder = folder.with_name(f".{folder.name}.taken")
        self._known_hashes: dict[str, tuple[FileStamp, str]] = {}
        self._free_bytes: int | None = None
        """Bytes that copies may still take; None where the command has ended, and needs none."""

    def begin(self, *, command_is_running: bool) -> Path:
        """An empty folder for what is taken."""
        shutil.rmtree(
            self._snapshot_folder, ignore_errors=True
        )  # of who was killed: what is copied over a link changes its file
        self._snapshot_folder.mkdir()
        self._free_bytes = free_bytes_for_copies(self._snapshot_folder) if command_is_running else None
        return self._snapshot_folder

    def end(self) -> None:
        shutil.rmtree(self._snapshot_folder, ignore_errors=True)

    def copy_file(self, path: str, as_copy: bool) -> CopyResult:
        """A link costs nothing, and stays when the command renames over the file. Where none can be made it is a copy.

        That copy was taken for a link that had been written over: each attempt copied one file more, of 100,000 without end.

        Raises:
            NoSpaceForCopy: beside the running command there is none for a copy.
        """
        source, target = Path(realpath(self._folder / path)), self._snapshot_folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if not as_copy:
            with suppress(OSError):  # where it cannot be, such as in another file system, it is copied
                target.hardlink_to(source)
                return CopyResult.LINKED
        try:
            self._reserve_space(path, source.stat().st_size)
            shutil.copyfile(source, target)
        except PermissionError as error:
            self._on_unreadable(error)
            return CopyResult.GONE
        except OSError as error:
            if error.errno not in MISSING_FILE_ERRNOS:
                raise
            return CopyResult.GONE
        return CopyResult.COPIED

    def describe_file(self, path: str, stamp: FileStamp | None, mode: int = FILE_MODE) -> FileRecord | None:
        """`stamp` is of a link; what was hashed before and has not changed is not read again. None where it may not be."""
        copied_path = self._snapshot_folder / path
        known = self._known_hashes.get(path)
        if stamp is None or known is None or known[0] != stamp:
            try:
                sha256 = hash_file(copied_path)
            except PermissionError as error:
                self._on_unreadable(PermissionError(error.errno, error.strerror, str(self._folder / path)))
                return None
            if stamp is not None:
                self._known_hashes[path] = (stamp, sha256)
        else:
            sha256 = known[1]
        size = copied_path.stat().st_size
        recorded_mode = None if mode == FILE_MODE else mode
        return FileRecord(path=path, sha256=sha256, size=size, mode=recorded_mode, object=object_name(path, sha256, size))

    def _reserve_space(self, path: str, size: int) -> None:
        """The copy of a large file filled the disk, and the command's own write failed."""
        if self._free_bytes is None:
            return
        self._free_bytes -= size
        if self._free_bytes < 0:
            raise NoSpaceForCopy(
                f"for want of space for a copy of {path}: none is needed of a file that is written under another name in the"
                " same folder, and renamed when it is whole"
            )


def free_bytes_for_copies(folder: Path) -> int:
    """Bytes that may be taken of a disk that a command writes to: a tenth of it stays free, or nearly all that is left."""
    disk = shutil.disk_usage(folder)
    return max(disk.free - disk.total // 10, disk.free // 100)
