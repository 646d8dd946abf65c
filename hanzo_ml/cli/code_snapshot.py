"""Collect the source files that are sent with a command job."""

import base64
import codecs
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hanzo_ml.cli.connection import Refused
from hanzo_ml.cli.output import sanitize_text
from recipes.contracts.command_job import MAX_CODE_BYTES
from recipes.storage.checksums import MANIFEST_FILE
from recipes.storage.folder_tree import FOLDER_MODE, default_code_mode, find_escaping_link

GENERATED_FOLDERS = {"__pycache__"}
DEPENDENCY_FOLDERS = {"node_modules", "venv"}
ENVIRONMENT_MARKERS = ("pyvenv.cfg", "conda-meta")
"""Files that mark a Python environment under any folder name."""
MAX_BINARY_SHARE = 0.3
"""Maximum share of non-ASCII bytes in a file that is not UTF-8, to count as text in another encoding."""
TEXT_BYTES = frozenset((*range(0x20, 0x7F), *b"\b\t\n\v\f\r\x1b"))
SAMPLE_BYTES = 1 << 16
"""Bytes read from a file to decide whether it is text."""
MAX_LISTED = 20
"""Maximum number of paths listed per reason."""


@dataclass
class CodeSnapshot:
    """What to send, by relative path, and what is left out, with the reason.

    Args:
        entries: `stat` of each of them, for modes and times; parent folders excluded.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)
    entries: dict[str, os.stat_result] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def attach_code(config: Path, document: dict[str, Any]) -> None:
    """Replace the key `code` of a job file with `files` and `source_tree`."""
    place = config.parent
    code = document.pop("code", None)
    if code is not None and not isinstance(code, str):
        raise Refused(f"`code:` in {config} must be a file or folder, relative to the job file, such as code: ./src")
    snapshot = read_code(place, code) if code else read_named_files(place, document["command"])
    if code:
        report_left_out(code, snapshot.left_out)
    if snapshot.entries:
        texts = {path: text for path, data in snapshot.files.items() if (text := read_text(path, data)) is not None}
        document["files"] = {**(document.get("files") or {}), **texts}
        document["source_tree"] = {**describe_tree(snapshot, texts), **(document.get("source_tree") or {})}
        if commit := read_git_commit(place):
            document.setdefault("git_commit", commit)


def describe_tree(snapshot: CodeSnapshot, texts: dict[str, str]) -> dict[str, Any]:
    """The value of `source_tree` (`recipes.contracts.command_job.SourceTree`)."""
    modes = {path: stat.S_IMODE(found.st_mode) & 0o777 for path, found in snapshot.entries.items()}
    return {
        "encoded": {path: base64.b64encode(data).decode() for path, data in snapshot.files.items() if path not in texts},
        "modes": {
            path: mode
            for path, mode in modes.items()
            if path not in snapshot.links
            and mode != (default_code_mode(snapshot.files[path]) if path in snapshot.files else FOLDER_MODE)
        },
        "modified_ns": {path: found.st_mtime_ns for path, found in snapshot.entries.items()},
        "links": snapshot.links,
        "folders": snapshot.folders,
    }


def read_code(place: Path, code: str) -> CodeSnapshot:
    """Read a folder, or one file.

    Raises:
        Refused: it does not exist, or a link leaves the folder.
    """
    source = place / code
    snapshot = CodeSnapshot()
    if source.is_file():
        add_named_file(snapshot, source.name, source)
    elif source.is_dir():
        root = Path(os.path.realpath(source))
        add_folder(snapshot, "", source, root)
        replace_escaping_links(snapshot, root)
    else:
        raise Refused(f"there is no {source}: check `code:`")
    return snapshot


def read_named_files(place: Path, command: Any) -> CodeSnapshot:
    """Read the files next to the job file that the command names."""
    snapshot = CodeSnapshot()
    words = [word for word in command if isinstance(word, str) and word] if isinstance(command, list) else []
    for word in words:
        relative = word.removeprefix("./")
        if not Path(word).is_absolute() and ".." not in Path(word).parts and (place / relative).is_file():
            add_named_file(snapshot, relative, place / relative)
    return snapshot


def replace_escaping_links(snapshot: CodeSnapshot, root: Path) -> None:
    """Replace links that leave the folder and return to it with direct ones."""
    while (path := find_escaping_link(snapshot.links)) is not None:
        parent = (root / path).parent
        snapshot.links[path] = os.path.relpath(os.path.realpath(root / path), os.path.realpath(parent))


def add_named_file(snapshot: CodeSnapshot, path: str, file: Path) -> None:
    """Raises Refused for a binary: one that is named is not left out."""
    if is_binary_file(file):
        raise Refused(f"{file} is not a text file: `code:` accepts source files, keep data in a dataset")
    snapshot.files[path], snapshot.entries[path] = read_source(file), file.stat()


def add_folder(snapshot: CodeSnapshot, path: str, folder: Path, root: Path) -> None:
    """Add everything below the folder `path`, or the folder itself if it is empty.

    Raises:
        Refused: a link leaves `root`, or a file cannot be read.
    """
    is_empty = True
    for entry in sorted(folder.iterdir()):
        below = f"{path}/{entry.name}" if path else entry.name
        if reason := find_exclusion(entry):
            snapshot.left_out[f"{below}/" if entry.is_dir() and not entry.is_symlink() else below] = reason
            continue
        is_empty = False
        snapshot.entries[below] = entry.lstat()
        if entry.is_symlink():
            snapshot.links[below] = read_link(entry, root)
        elif entry.is_dir():
            add_folder(snapshot, below, entry, root)
        else:
            snapshot.files[below] = read_source(entry)
    if is_empty and path:
        snapshot.folders.append(path)


def read_link(link: Path, root: Path) -> str:
    """The target of a link, rewritten if it leaves `root` and comes back."""
    text = os.readlink(link)  # noqa: PTH115 - a Path would write it otherwise
    place, real = Path(os.path.realpath(link.parent)), Path(os.path.realpath(link.parent / text))
    if not real.is_relative_to(root):
        raise Refused(
            f"{link} is a link that leaves the folder of `code:`, to {text}: put a copy of what it leads to in its place, "
            "or name a folder that holds both"
        )
    written = os.path.normpath(os.path.relpath(place, root) + "/" + text)
    return os.path.relpath(real, place) if text.startswith("/") or written.startswith("..") else text


def find_exclusion(entry: Path) -> str | None:
    """Why an entry is left out; None if it is sent."""
    if entry.name.startswith("."):
        return "hidden"
    if entry.name in GENERATED_FOLDERS:
        return "generated"
    if entry.name in DEPENDENCY_FOLDERS or any((entry / marker).exists() for marker in ENVIRONMENT_MARKERS):
        return "environment"
    if entry.is_symlink() or entry.is_dir():
        return None
    if not entry.is_file():
        return "no file"
    return "binary" if is_binary_file(entry) else None


def is_binary_file(file: Path) -> bool:
    """Whether the beginning of a file is not text in an encoding that extends ASCII."""
    with readable(file), file.open("rb") as opened:
        data = opened.read(SAMPLE_BYTES)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(data, final=len(data) < SAMPLE_BYTES)
    except UnicodeDecodeError:
        odd = sum(byte not in TEXT_BYTES for byte in data)
        return b"\0" in data or odd > MAX_BINARY_SHARE * len(data)
    return False


def read_source(file: Path) -> bytes:
    """Read a file. Raises Refused if it is unreadable or too large for a request."""
    with readable(file):
        if (size := file.stat().st_size) > MAX_CODE_BYTES:
            raise Refused(
                f"{file} makes {size} bytes of source files, the limit is {MAX_CODE_BYTES}: keep data in a dataset"
            )
        return file.read_bytes()


@contextmanager
def readable(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Refused(f"{file} cannot be read: {error.strerror}") from None


def read_text(path: str, data: bytes) -> str | None:
    """The text of a file for `files`, line ends kept.

    None if it is not UTF-8 or its name is reserved.
    """
    try:
        return data.decode() if path != MANIFEST_FILE else None
    except UnicodeDecodeError:
        return None


def report_left_out(code: str, left_out: dict[str, str]) -> None:
    """Print what is left out to stderr."""
    if left_out:
        for line in left_out_lines(code, left_out):
            print(sanitize_text(line), file=sys.stderr)


def left_out_lines(code: str, left_out: dict[str, str]) -> Iterator[str]:
    yield f"left out of code: {code}"
    for reason in dict.fromkeys(left_out.values()):
        paths = [path for path, found in left_out.items() if found == reason]
        more = f" and {len(paths) - MAX_LISTED} more" if len(paths) > MAX_LISTED else ""
        yield f"  {reason}: {', '.join(paths[:MAX_LISTED])}{more}"


def read_git_commit(folder: Path) -> str:
    """The commit of the Git checkout around a folder; empty if there is none."""
    try:
        done = subprocess.run(["git", "-C", folder, "rev-parse", "--verify", "-q", "HEAD"], capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
