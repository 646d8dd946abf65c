"""Publish a checkpoint folder atomically, and verify it."""

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from pydantic import JsonValue, ValidationError

from recipes.checkpoints.node_parts import part_from_manifest
from recipes.storage.artifact_store import MANIFEST_FILE, describe_files, find_file_corruption
from recipes.storage.manifest import Manifest

# Place selected files of one folder into another; other files there are unverified and stay behind.


def place_files(source: Path, target: Path, names: Iterable[str], one: Callable[[Path, Path], object]) -> None:
    """Apply `one`, which moves, copies or links a file, to each of the named files."""
    target.mkdir(parents=True, exist_ok=True)
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        one(source / name, target / name)


def link_file(source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    os.link(source, target)


CHECKPOINT_KIND = "checkpoint"


def commit_checkpoint(temporary: Path, final: Path, facts: Mapping[str, JsonValue]) -> None:
    """Publish a finished checkpoint atomically.

    Hash every file, write the manifest last, fsync, then rename `temporary` to `final`: after a crash at any point there is
    either the previous checkpoint or the complete new one. Costs about one read and one write of its size.
    """
    manifest = Manifest(kind=CHECKPOINT_KIND, files=describe_files(temporary), facts={**facts, "step": int(final.name)})
    (temporary / MANIFEST_FILE).write_bytes(manifest.to_bytes())
    for path in (
        *temporary.rglob("*"),
        temporary,
    ):  # fsync the directory as well: without it a power failure can lose the directory entry
        fsync_path(path)
    rename_durably(temporary, final)


def complete_interrupted_commit(temporary: Path, final: Path) -> bool:
    """Rename a complete checkpoint whose commit was interrupted; return whether there was one."""
    step = int(final.name)
    lacks_its_name = find_corruption(temporary, step) is None and find_corruption(final, step) is not None
    if lacks_its_name:
        rename_durably(temporary, final)
    return lacks_its_name


def rename_durably(temporary: Path, final: Path) -> None:
    """Rename `temporary` to `final` and fsync the parent directory."""
    # an earlier version of the same step; from here on only `temporary` is complete
    shutil.rmtree(final, ignore_errors=True)
    os.replace(temporary, final)
    fsync_path(final.parent)


def update_metadata(folder: Path, facts: Mapping[str, JsonValue]) -> None:
    """Add facts to a checkpoint's manifest; its files are unchanged."""
    file, temporary = folder / MANIFEST_FILE, folder / f".{MANIFEST_FILE}"
    temporary.write_bytes(with_metadata(Manifest.model_validate_json(file.read_bytes()), facts).to_bytes())
    fsync_path(temporary)
    os.replace(temporary, file)
    fsync_path(folder)


def with_metadata(manifest: Manifest, facts: Mapping[str, JsonValue]) -> Manifest:
    return manifest.model_copy(update={"facts": {**manifest.facts, **facts}})


def find_corruption(folder: Path, step: int) -> str | None:
    """Return what is wrong with the checkpoint folder of `step`, or None."""
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST_FILE).read_bytes())
    except FileNotFoundError:
        return "has no manifest"
    except ValidationError:
        return "has an unreadable manifest"
    if manifest.facts.get("step") != step:
        return "has the manifest of another step"
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as hashing:  # nothing trains meanwhile, so all cores are free
        return next(filter(None, hashing.map(partial(find_file_corruption, folder), manifest.files)), None)


def read_content_digest(folder: Path) -> str:
    """Return a digest of a checkpoint's content; empty if there is no checkpoint.

    Equal on every machine, independent of metadata added later and of the share that the machine holds.
    """
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST_FILE).read_bytes())
    except (FileNotFoundError, ValidationError):
        return ""
    part = part_from_manifest(manifest)
    return part.save if part else hash_checkpoint_files(manifest)


def hash_checkpoint_files(manifest: Manifest) -> str:
    """Return the digest of a checkpoint's files."""
    return Manifest(kind=CHECKPOINT_KIND, files=manifest.files).digest


def checkpoint_file_bytes(folder: Path) -> int:
    """Return the total size of a checkpoint's files, from its manifest."""
    return Manifest.model_validate_json((folder / MANIFEST_FILE).read_bytes()).size_bytes


def free_disk_bytes(folder: Path) -> int:
    """Return the free bytes of the folder's disk."""
    return shutil.disk_usage(folder).free


def fsync_path(path: Path) -> None:
    """fsync a file or folder.

    A rename must never reach the disk before the data it refers to.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
