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

# Copies the files of a snapshot out of the folder that a command writes to, as hard links if possible.
#
# `recipes.command.snapshot_publisher` decides when files are copied, and whether they form a snapshot.


class CopyResult(Enum):
    """What happened to a file of the folder."""

    LINKED = auto()
    COPIED = auto()
    GONE = auto()


class NoSpaceForCopy(Exception):
    """A copy would use disk space that the running command needs."""


class SnapshotCopy:
    """Copies the files of one folder into a folder next to it.

    Args:
        on_unreadable: called with the error for each file that may not be read.
    """

    def __init__(self, folder: Path, on_unreadable: Callable[[OSError], None]) -> None:
        self._folder = folder
        self._on_unreadable = on_unreadable
        self._snapshot_folder = folder.with_name(f".{folder.name}.taken")
        self._known_hashes: dict[str, tuple[FileStamp, str]] = {}
        self._free_bytes: int | None = None
        """Bytes that copies may still use; None after the command has ended, when there is no limit."""

    def begin(self, *, command_is_running: bool) -> Path:
        """Return an empty folder for the copies."""
        shutil.rmtree(
            self._snapshot_folder, ignore_errors=True
        )  # left after a kill: copying over a link would change the command's file
        self._snapshot_folder.mkdir()
        self._free_bytes = free_bytes_for_copies(self._snapshot_folder) if command_is_running else None
        return self._snapshot_folder

    def end(self) -> None:
        shutil.rmtree(self._snapshot_folder, ignore_errors=True)

    def copy_file(self, path: str, as_copy: bool) -> CopyResult:
        """Link or copy a file into the snapshot folder.

        A link is free, and keeps the contents if the command renames another file over it. If no link is possible, the file
        is copied.

        The result states which it was: such copies once counted as links that had been written over, and each attempt copied
        one file more, without end in a folder of 100,000.

        Raises:
            NoSpaceForCopy: the running command needs the disk space.
        """
        source, target = Path(realpath(self._folder / path)), self._snapshot_folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if not as_copy:
            with suppress(OSError):  # if linking fails, such as on another file system, copy
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
        """Return the manifest record of a copied file.

        Returns None if the file may not be read. `stamp` is given for a linked file: if it is unchanged, its known hash is
        used.
        """
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
        """Reserve disk space for a copy.

        The copy of a large file once filled the disk, and the command's own write failed.
        """
        if self._free_bytes is None:
            return
        self._free_bytes -= size
        if self._free_bytes < 0:
            raise NoSpaceForCopy(
                f"for want of space for a copy of {path}: none is needed of a file that is written under another name in the"
                " same folder, and renamed when it is whole"
            )


def free_bytes_for_copies(folder: Path) -> int:
    """Return how many bytes copies may use.

    A tenth of the disk stays free, or nearly all of the rest.
    """
    disk = shutil.disk_usage(folder)
    return max(disk.free - disk.total // 10, disk.free // 100)
