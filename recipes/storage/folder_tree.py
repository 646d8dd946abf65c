"""Write an artifact's files back as the folder that was saved: modes, links, empty folders and times."""

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
"""Modes that a manifest does not state."""
EXECUTABLE_MODE = 0o755
MAX_LINKS_FOLLOWED = 40
"""As Linux does; a path with more leads nowhere."""


def default_code_mode(data: bytes) -> int:
    """Mode of a source file of a command whose record states none: a script can be run."""
    return EXECUTABLE_MODE if data.startswith(b"#!") else FILE_MODE


# Where links lead, by their texts alone.


def resolve_link(path: str, links: Mapping[str, str]) -> str | None:
    """The path in the folder that a link leads to, as the kernel follows it; None where it leaves the folder.

    `links` are all links of the folder by their paths. One that leads to itself stays inside, and is its own result.
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
    """The path of a link that leaves the folder; None where there is none."""
    return next((path for path in sorted(links) if resolve_link(path, links) is None), None)


# Times lie beside an artifact, in an object that its digest does not cover: equal work has equal digests.

TIMES_FILE = "times.json"


def code_index_uri(code_uri: str) -> str:
    """The folder of what is known of a command's source files beside their bytes."""
    return f"{code_uri}.index"


def put_times(store: Store, index_uri: str, times: Mapping[str, int]) -> None:
    """Store modification times, in nanoseconds by path."""
    store.put_bytes(f"{index_uri}/{TIMES_FILE}", canonical_json(dict(times)))


def read_times(store: Store, index_uri: str) -> dict[str, int]:
    """The times that lie there; empty where none were stored, as by older releases, or they cannot be read."""
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
    """Write files, folders and links below `target`, in place of what lies at their paths. Anything else there stays.

    Args:
        files: records by the paths that they get.
        source: the verified local file of such a path.
        default_mode: mode of a file whose record states none.

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
    for folder in sorted(made, key=lambda path: path.count("/"), reverse=True):  # a parent may deny access to what is below
        set_time(target / folder, times.get(folder))
        (target / folder).chmod(modes.get(folder, FOLDER_MODE))


def check_paths(paths: Iterable[str], links: Mapping[str, str]) -> None:
    """Raises BrokenArtifact for what would be written, or would lead, outside of the folder."""
    if (escaping := find_escaping_link(links)) is not None:
        raise BrokenArtifact(f"the link {escaping} -> {links[escaping]} leaves its folder")
    for path in paths:
        parts = path.split("/")
        if any(part in ("", ".", "..") for part in parts):
            raise BrokenArtifact(f"{path!r} is no path in a folder")
        if through := next((above for above in parents(path) if above in links), None):
            raise BrokenArtifact(f"{path} lies below {through}, which is a link")


def parents(path: str) -> list[str]:
    """The folders above a path, the deepest first."""
    return [parent.as_posix() for parent in PurePosixPath(path).parents if parent.name]


def parent_path(path: str) -> str:
    return path.rpartition("/")[0]


def make_folder(root: Path, path: str, made: set[str]) -> None:
    """Make a folder and those above it writable until their modes are set; what is no folder there goes."""
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
    """Remove a file, a link, or a folder with all it holds; nothing where nothing is there."""
    if path.is_dir() and not path.is_symlink():
        remove_tree(path)
    else:
        path.unlink(missing_ok=True)


def remove_tree(folder: Path) -> None:
    """Remove a folder, also one whose mode, or that of a folder in it, denies writing. Nothing where there is none."""
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
