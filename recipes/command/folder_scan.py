"""Scan a command's checkpoints folder: its files, links and folders, without reading their contents."""

import errno
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path, PurePosixPath

from recipes.storage.folder_tree import FILE_MODE, FOLDER_MODE

# A scan only lists entries and compares them with the previous scan. `recipes.command.snapshot_publisher` decides when a
# snapshot is made.

MISSING_FILE_ERRNOS = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
"""The errors for an entry that is gone, and for a link to nothing or to itself."""


class EntryKind(Enum):
    FILE = "file"
    LINK = "link"
    FOLDER = "folder"


@dataclass(frozen=True)
class FileStamp:
    """Metadata that shows, without reading the contents, whether an entry has changed.

    Times are in nanoseconds.

    Args:
        modified: of a file; the time of a link or folder is in `entry_modified`, which does not count as a change.
        link: the target of a link, relative to the link's folder.
        is_empty: whether a folder contains nothing that could be published.
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
    """Do nothing: a later scan has already reported the problem."""


def scan_folder(folder: Path, on_unreadable: Callable[[OSError], None] = ignore_problem) -> dict[str, FileStamp]:
    """Return all files, links and folders below a folder, by relative path.

    A link to something inside the folder is returned as a link. A link to something outside is followed: a folder there is
    returned with all its contents.

    Args:
        on_unreadable: called with an error, including the path, for each entry that cannot be published.

    Raises:
        OSError: the disk cannot be read.
    """
    return dict(FolderScanner(on_unreadable).scan("", folder, ((PurePosixPath(), Path(os.path.realpath(folder))),)))


Roots = tuple[tuple[PurePosixPath, Path], ...]
"""The scanned folder and each outside folder that a link leads to: their paths in the scan and their real paths."""


class FolderScanner:
    def __init__(self, on_unreadable: Callable[[OSError], None]) -> None:
        self._on_unreadable = on_unreadable

    def scan(self, path: str, folder: Path, roots: Roots) -> Iterator[tuple[str, FileStamp]]:
        """Yield what is below a folder, whose own path in the scan is `path`."""
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
                self._report(folder / name, "it is not a file, link or folder")

    def _scan_folder(self, path: str, folder: Path, found: os.stat_result, roots: Roots) -> Iterator[tuple[str, FileStamp]]:
        inside = list(self.scan(path, folder, roots))
        yield path, stamp_folder(found, is_empty=not inside)
        yield from inside

    def _scan_link(self, path: str, link: Path, found: os.stat_result, roots: Roots) -> Iterator[tuple[str, FileStamp]]:
        """Yield a link that stays inside one of `roots`, or its target."""
        try:
            text = os.readlink(link)  # noqa: PTH115 - a Path would normalize the text
            if not is_unicode(text):
                self._report(link, "its target's name is not UTF-8")
                return
            if (target := find_inner_target(path, text, link, roots)) is not None:
                yield path, FileStamp(kind=EntryKind.LINK, link=target, mode=0, entry_modified=found.st_mtime_ns)
                return
            outside = link.stat()
        except OSError as error:
            if error.errno in MISSING_FILE_ERRNOS:
                self._report(link, "its target is outside the folder and does not exist")
            else:
                self._report_unless_missing(error)
            return
        real = Path(os.path.realpath(link))
        if stat.S_ISREG(outside.st_mode):
            yield path, stamp_file(outside)
        elif not stat.S_ISDIR(outside.st_mode):
            self._report(link, "its target is not a file or folder")
        elif any(root.is_relative_to(real) for _, root in roots):
            self._report(link, "its target is a folder that contains the link")
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
    """Return the target of a link if it stays inside the scanned folders.

    Returns None if the link leaves them. The text of the link is kept where possible; otherwise an equivalent relative path
    is returned.
    """
    real = Path(os.path.realpath(link.parent / text))
    parent = PurePosixPath(path).parent
    for prefix, root in reversed(roots):
        # Prefer the path as written if it leads to the same target: it may name another link in the folder.
        below = find_written_path(parent, text, prefix, root)
        if below is not None and Path(os.path.realpath(root / below)) == real:
            return os.path.relpath(prefix / below, parent) if text.startswith("/") else text
        if real.is_relative_to(root):
            return os.path.relpath(prefix / real.relative_to(root), parent)
    return None


def find_written_path(parent: PurePosixPath, text: str, prefix: PurePosixPath, root: Path) -> PurePosixPath | None:
    """Return the path below `root` that the text of a link names, or None.

    Other links are not followed.
    """
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
    """Return the stamp of a file or of a link's target.

    None if it does not exist or cannot be read.
    """
    try:
        found = path.stat()
    except OSError as error:
        if isinstance(error, PermissionError) or error.errno in MISSING_FILE_ERRNOS:
            return None
        raise
    return stamp_file(found) if stat.S_ISREG(found.st_mode) else None


def find_changed_files(before: Scan, now: Scan) -> frozenset[str]:
    """Return the files that are new or changed since the previous scan.

    Removed files are not included: a removal leaves nothing half written.
    """
    return frozenset(path for path, stamp in now.items() if stamp.kind is EntryKind.FILE and before.get(path) != stamp)


def is_recorded(stamp: FileStamp) -> bool:
    """Return whether an entry is listed in a manifest.

    A folder is listed only if its files do not imply it.
    """
    return stamp.kind is not EntryKind.FOLDER or stamp.is_empty or stamp.mode != FOLDER_MODE


def is_unicode(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
