"""Folders with every kind of entry, and listings to compare two of them."""

import os
import stat
from pathlib import Path
from typing import Any

OLDEST = 1_500_000_000_123_456_789


def write_folder(folder: Path) -> Path:
    """Write a folder with every kind of entry.

    It holds steps whose order by time differs from that by name, modes, links, empty folders, and names that the store
    itself uses.
    """
    files = {
        "step-200/weights": b"\x00\xff" * 50,
        "step-300/weights": b"300",
        "step-100/weights": b"100",
        "manifest.json": b'{"mine": 1}',
        "step-100/manifest.json": b"mine too",
        "empty": b"",
        "crlf.txt": b"a\r\nb\r\n",
        ".hidden/.objects": b"hidden",
        ".objects/mine": b"in a folder of ours",
        "draft#1": b"a name of unfinished uploads",
        "new\nline": b"a name with a control character",
        "na\u00efve \u2028%2F?.txt": b"odd name",
        "private": b"key",
        "run.sh": b"#!/bin/sh\n",
        "plain.sh": b"#!/bin/sh\n",
        "read-only/data": b"1",
    }
    for path, data in files.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
        place.chmod(0o644)
    for path in ("logs/empty", "closed"):
        (folder / path).mkdir(parents=True)
    (folder / "last").symlink_to("step-200")
    (folder / "newest.txt").symlink_to("step-200/weights")
    (folder / "chain").symlink_to("last/weights")
    (folder / "step-100" / "up").symlink_to("../step-300")
    (folder / "nowhere").symlink_to("step-400")
    modes = {"private": 0o600, "run.sh": 0o755, "plain.sh": 0o644, "closed": 0o700, "read-only/data": 0o444}
    for path, mode in {**modes, "read-only": 0o555}.items():
        (folder / path).chmod(mode)
    for number, path in enumerate(sorted(folder.rglob("*"), key=lambda path: (-len(path.parts), path.name))):
        os.utime(path, ns=(OLDEST, OLDEST + number * 1_000_000_007), follow_symlinks=False)
    for number, step in enumerate(("step-200", "step-300", "step-100")):  # step-100 was saved last
        os.utime(folder / step, ns=(OLDEST, OLDEST + 10**15 + number))
    return folder


def read_folder(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Return each entry below a folder: kind, mode, mtime in nanoseconds, content or target."""
    found: dict[str, tuple[Any, ...]] = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        name, mode = path.relative_to(folder).as_posix(), stat.S_IMODE(status.st_mode)
        if path.is_symlink():
            found[name] = ("link", status.st_mtime_ns, os.readlink(path))  # noqa: PTH115 - a Path would write it otherwise
        elif path.is_dir():
            found[name] = ("folder", mode, status.st_mtime_ns)
        else:
            found[name] = ("file", mode, status.st_mtime_ns, path.read_bytes())
    return found
