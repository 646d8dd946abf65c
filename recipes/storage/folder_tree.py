"""Restore an artifact as the folder that was saved: modes, links, empty folders, times."""

import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath

from recipes.storage.artifact_store import BrokenArtifact, Store
from recipes.storage.manifest import FileRecord, FolderRecord, LinkRecord, canonical_json

FILE_MODE = 0o644
FOLDER_MODE = 0o755
"""Modes of files and folders whose manifest states none."""
EXECUTABLE_MODE = 0o755
MAX_LINKS_FOLLOWED = 40
"""Linux' limit; a path through more links does not resolve."""


def default_code_mode(data: bytes) -> int:
    """Return the mode of a command's source file without a recorded mode: scripts are executable."""
    return EXECUTABLE_MODE if data.startswith(b"#!") else FILE_MODE


# Resolve links from their texts alone.


def resolve_link(path: str, links: Mapping[str, str]) -> str | None:
    """Return the path in the folder that a link resolves to, as in the kernel.

    None if it leaves the folder. `links` are all links of the folder by path. A link to itself counts as inside and resolves
    to itself.
    """
    found: list[str] = []
    pending = path.split("/")
    followed = 0
    while pending:
        part = pending.pop(0)
        if part in ("", "."):
            continue
        if part == "..":
            if not found:
                return None
            found.pop()
            continue
        found.append(part)
        target = links.get("/".join(found))
        if target is None:
            continue
        followed += 1
        if target.startswith("/"):
            return None
        if followed > MAX_LINKS_FOLLOWED:
            return path
        found.pop()
        pending = [*target.split("/"), *pending]
    return "/".join(found)


def find_escaping_link(links: Mapping[str, str]) -> str | None:
    """Return the path of a link that leaves the folder, or None."""
    return next((path for path in sorted(links) if resolve_link(path, links) is None), None)


# Times are stored in a separate object outside the artifact's digest: equal work has equal digests.

TIMES_FILE = "times.json"


def code_index_uri(code_uri: str) -> str:
    """Return the folder for metadata of a command's source files."""
    return f"{code_uri}.index"


def put_times(store: Store, index_uri: str, times: Mapping[str, int]) -> None:
    """Store modification times in nanoseconds, by path."""
    store.put_bytes(f"{index_uri}/{TIMES_FILE}", canonical_json(dict(times)))


def read_times(store: Store, index_uri: str) -> dict[str, int]:
    """Read the stored times.

    Empty if there are none, as for older releases, or they are invalid.
    """
    try:
        document = json.loads(store.get_bytes(f"{index_uri}/{TIMES_FILE}"))
    except (FileNotFoundError, ValueError):
        return {}
    if not isinstance(document, dict):
        return {}
    return {path: time for path, time in document.items() if isinstance(time, int)}


# Writing.


def write_tree(
    target: Path,
    files: Mapping[str, FileRecord],
    source: Callable[[str], Path],
    *,
    folders: Iterable[FolderRecord] = (),
    links: Iterable[LinkRecord] = (),
    times: Mapping[str, int] | None = None,
    default_mode: Callable[[Path], int] = lambda path: FILE_MODE,
) -> None:
    """Write files, folders and links below `target`, replacing what is at their paths.

    Other files stay.

    Args:
        files: records by target path.
        source: returns the verified local file for a path.
        default_mode: returns the mode of a file whose record states none.

    Raises:
        BrokenArtifact: a link leaves the folder, or a path leads through a link.
    """
    targets = {link.path: link.target for link in links}
    modes = {folder.path: FOLDER_MODE if folder.mode is None else folder.mode for folder in folders}
    check_paths([*files, *modes, *targets], targets)
    target.mkdir(parents=True, exist_ok=True)
    made: set[str] = set()
    for folder in modes:
        make_folder(target, folder, made)
    for path, record in files.items():
        make_folder(target, parent_path(path), made)
        place = target / path
        remove_path(place)
        shutil.copyfile(source(path), place)
        place.chmod(default_mode(place) if record.mode is None else record.mode)
    for path, text in targets.items():
        make_folder(target, parent_path(path), made)
        remove_path(target / path)
        (target / path).symlink_to(text)
    times = times or {}
    for path in (*files, *targets):
        set_time(target / path, times.get(path))
    # a parent may deny access to what it contains
    for folder in sorted(made, key=lambda path: path.count("/"), reverse=True):
        set_time(target / folder, times.get(folder))
        (target / folder).chmod(modes.get(folder, FOLDER_MODE))


def check_paths(paths: Iterable[str], links: Mapping[str, str]) -> None:
    """Raise BrokenArtifact if a path or link would lead outside the folder."""
    if (escaping := find_escaping_link(links)) is not None:
        raise BrokenArtifact(f"the link {escaping} -> {links[escaping]} leaves its folder")
    for path in paths:
        parts = path.split("/")
        if any(part in ("", ".", "..") for part in parts):
            raise BrokenArtifact(f"{path!r} is not a path in a folder")
        if through := next((above for above in parents(path) if above in links), None):
            raise BrokenArtifact(f"{path} is below {through}, which is a link")


def parents(path: str) -> list[str]:
    """Return the folders above a path, deepest first."""
    return [parent.as_posix() for parent in PurePosixPath(path).parents if parent.name]


def parent_path(path: str) -> str:
    return path.rpartition("/")[0]


def make_folder(root: Path, path: str, made: set[str]) -> None:
    """Create a folder and its parents, writable until their modes are set.

    Files in their place are removed.
    """
    for folder in (*reversed(parents(path)), *([path] if path else [])):
        if folder in made:
            continue
        place = root / folder
        if place.is_symlink() or (place.exists() and not place.is_dir()):
            place.unlink()
        place.mkdir(exist_ok=True)
        place.chmod(stat.S_IMODE(place.stat().st_mode) | stat.S_IRWXU)
        made.add(folder)


def remove_path(path: Path) -> None:
    """Remove a file, a link, or a folder with its contents, if it exists."""
    if path.is_dir() and not path.is_symlink():
        remove_tree(path)
    else:
        path.unlink(missing_ok=True)


def remove_tree(folder: Path) -> None:
    """Remove a folder if it exists, even if modes inside it deny writing."""
    if not folder.is_dir():
        return
    folder.chmod(stat.S_IRWXU)
    for place, names, _ in os.walk(folder):
        for name in names:
            below = Path(place, name)
            if not below.is_symlink():
                below.chmod(stat.S_IRWXU)
    shutil.rmtree(folder)


def set_time(path: Path, modified_ns: int | None) -> None:
    if modified_ns is not None:
        os.utime(path, ns=(modified_ns, modified_ns), follow_symlinks=False)
