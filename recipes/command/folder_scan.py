"""Scan a command's checkpoints folder: its files, links and folders, without reading any."""

import errno
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path, PurePosixPath

from recipes.storage.folder_tree import FILE_MODE, FOLDER_MODE

# What a look at a command's checkpoints folder finds, and which files have changed since the look before.
#
# Nothing is read, and nothing is decided here: when a state is made is `recipes.command.snapshot_publisher`.

MISSING_FILE_ERRNOS = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
"""Of what is gone, and of a link that leads nowhere, or to itself."""


class EntryKind(Enum):
    FILE = "file"
    LINK = "link"
    FOLDER = "folder"


@dataclass(frozen=True)
class FileStamp:
    """Shows whether an entry has changed, without reading it. Times are in nanoseconds.

    Args:
        modified: of a file; that of a link or folder is `entry_modified`, by which it does not count as changed.
        link: where a link leads, relative to its own folder.
        is_empty: whether a folder holds nothing that could be published.
    """

    size: int = 0
    modified: int = 0
    inode: int = 0
    mode: int = FILE_MODE
    kind: EntryKind = EntryKind.FILE
    link: str = ""
    is_empty: bool = False
    entry_modified: int = field(default=0, compare=False)

    @property
    def modified_ns(self) -> int:
        return self.modified if self.kind is EntryKind.FILE else self.entry_modified


Scan = Mapping[str, FileStamp]


def ignore_problem(problem: OSError) -> None:
    """A later scan has reported it already."""


def scan_folder(folder: Path, on_unreadable: Callable[[OSError], None] = ignore_problem) -> dict[str, FileStamp]:
    """All files, links and folders below a folder, by their paths in it.

    A link that stays in the folder is one; one that leaves it is what it leads to, a folder with all that this holds.

    Args:
        on_unreadable: receives an error with the path of each entry that cannot be published.

    Raises:
        OSError: the disk does not say what lies there.
    """
    return dict(FolderScanner(on_unreadable).scan("", folder, ((PurePosixPath(), Path(os.path.realpath(folder))),)))


Roots = tuple[tuple[PurePosixPath, Path], ...]
"""Where the scanned folder lies, and each folder outside of it that a link led to: path in the scan, and real path."""


class FolderScanner:
    def __init__(self, on_unreadable: Callable[[OSError], None]) -> None:
        self._on_unreadable = on_unreadable

    def scan(self, path: str, folder: Path, roots: Roots) -> Iterator[tuple[str, FileStamp]]:
        """What lies below a folder, whose own path in the scan is `path`."""
        for name in self._list(folder):
            below = f"{path}/{name}" if path else name
            if not is_unicode(below):
                self._report(folder / name, "its name is not UTF-8")
                continue
            try:
                found = (folder / name).lstat()
            except OSError as error:
                self._report_unless_missing(error)
                continue
            if stat.S_ISDIR(found.st_mode):
                yield from self._scan_folder(below, folder / name, found, roots)
            elif stat.S_ISLNK(found.st_mode):
                yield from self._scan_link(below, folder / name, found, roots)
            elif stat.S_ISREG(found.st_mode):
                yield below, stamp_file(found)
            else:
                self._report(folder / name, "it is no file, link or folder")

    def _scan_folder(self, path: str, folder: Path, found: os.stat_result, roots: Roots) -> Iterator[tuple[str, FileStamp]]:
        inside = list(self.scan(path, folder, roots))
        yield path, stamp_folder(found, is_empty=not inside)
        yield from inside

    def _scan_link(self, path: str, link: Path, found: os.stat_result, roots: Roots) -> Iterator[tuple[str, FileStamp]]:
        """A link that stays inside one of `roots`, or what it leads to."""
        try:
            text = os.readlink(link)  # noqa: PTH115 - a Path would write it otherwise
            if not is_unicode(text):
                self._report(link, "the name that it leads to is not UTF-8")
                return
            if (target := find_inner_target(path, text, link, roots)) is not None:
                yield path, FileStamp(kind=EntryKind.LINK, link=target, mode=0, entry_modified=found.st_mtime_ns)
                return
            outside = link.stat()
        except OSError as error:
            if error.errno in MISSING_FILE_ERRNOS:
                self._report(link, "it leads out of the folder, to nothing")
            else:
                self._report_unless_missing(error)
            return
        real = Path(os.path.realpath(link))
        if stat.S_ISREG(outside.st_mode):
            yield path, stamp_file(outside)
        elif not stat.S_ISDIR(outside.st_mode):
            self._report(link, "it leads to no file or folder")
        elif any(root.is_relative_to(real) for _, root in roots):
            self._report(link, "it leads to a folder that holds its own")
        else:
            yield from self._scan_folder(path, link, outside, (*roots, (PurePosixPath(path), real)))

    def _list(self, folder: Path) -> list[str]:
        try:
            return sorted(path.name for path in folder.iterdir())
        except OSError as error:
            self._report_unless_missing(error)
            return []

    def _report_unless_missing(self, error: OSError) -> None:
        if isinstance(error, PermissionError):
            self._on_unreadable(error)
        elif error.errno not in MISSING_FILE_ERRNOS:
            raise error

    def _report(self, path: Path, reason: str) -> None:
        shown = str(path).encode("utf-8", "backslashreplace").decode()
        self._on_unreadable(OSError(errno.EINVAL, reason, shown))


def find_inner_target(path: str, text: str, link: Path, roots: Roots) -> str | None:
    """The text of a link, or of one that leads to the same, which stays inside what is scanned; None: it leaves it."""
    real = Path(os.path.realpath(link.parent / text))
    parent = PurePosixPath(path).parent
    for prefix, root in reversed(roots):
        # As it was written, where that leads to the same: it may name another link of the folder.
        below = find_written_path(parent, text, prefix, root)
        if below is not None and Path(os.path.realpath(root / below)) == real:
            return os.path.relpath(prefix / below, parent) if text.startswith("/") else text
        if real.is_relative_to(root):
            return os.path.relpath(prefix / real.relative_to(root), parent)
    return None


def find_written_path(parent: PurePosixPath, text: str, prefix: PurePosixPath, root: Path) -> PurePosixPath | None:
    """The path below `root` that the text of a link names, without following other links; None where it names none."""
    if text.startswith("/"):
        named = Path(os.path.realpath(Path(text).parent), Path(text).name)
        return PurePosixPath(named.relative_to(root)) if named.is_relative_to(root) else None
    written = PurePosixPath(os.path.normpath(parent / text))
    return written.relative_to(prefix) if ".." not in written.parts and written.is_relative_to(prefix) else None


def stamp_file(found: os.stat_result) -> FileStamp:
    return FileStamp(found.st_size, found.st_mtime_ns, found.st_ino, found.st_mode & 0o777)


def stamp_folder(found: os.stat_result, *, is_empty: bool) -> FileStamp:
    mode = found.st_mode & 0o777
    return FileStamp(mode=mode, kind=EntryKind.FOLDER, is_empty=is_empty, entry_modified=found.st_mtime_ns)


def stat_file(path: Path) -> FileStamp | None:
    """The stamp of a file, or of that a link leads to; None where there is none, or no longer."""
    try:
        found = path.stat()
    except OSError as error:
        if isinstance(error, PermissionError) or error.errno in MISSING_FILE_ERRNOS:
            return None
        raise
    return stamp_file(found) if stat.S_ISREG(found.st_mode) else None


def find_changed_files(before: Scan, now: Scan) -> frozenset[str]:
    """Files that are new or others since the look before; what went away leaves nothing half written."""
    return frozenset(path for path, stamp in now.items() if stamp.kind is EntryKind.FILE and before.get(path) != stamp)


def is_recorded(stamp: FileStamp) -> bool:
    """Whether an entry stands in a manifest: folders do where no file tells of them."""
    return stamp.kind is not EntryKind.FOLDER or stamp.is_empty or stamp.mode != FOLDER_MODE


def is_unicode(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
