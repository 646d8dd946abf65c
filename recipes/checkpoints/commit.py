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

# Files of one folder that are wanted in another, and no others that lie there: nobody has hashed those.


def place_files(source: Path, target: Path, names: Iterable[str], one: Callable[[Path, Path], object]) -> None:
    """`one` is what brings a file: it moves, copies or links it."""
    target.mkdir(parents=True, exist_ok=True)
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        one(source / name, target / name)


def link_file(source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    os.link(source, target)


CHECKPOINT_KIND = "checkpoint"


def commit_checkpoint(temporary: Path, final: Path, facts: Mapping[str, JsonValue]) -> None:
    """Make what was written to `temporary` the checkpoint at `final`: hashes, the manifest last, and then its name.

    All of it is on the disk before it has that name. It takes about as long as reading and writing it all once.
    """
    manifest = Manifest(kind=CHECKPOINT_KIND, files=describe_files(temporary), facts={**facts, "step": int(final.name)})
    (temporary / MANIFEST_FILE).write_bytes(manifest.to_bytes())
    for path in (
        *temporary.rglob("*"),
        temporary,
    ):  # the folder too: a file that it does not name yet is gone with the power
        fsync_path(path)
    rename_durably(temporary, final)


def complete_interrupted_commit(temporary: Path, final: Path) -> bool:
    """Give a checkpoint its name where a kill came between: all of it lies in `temporary`, and nothing whole at `final`."""
    step = int(final.name)
    lacks_its_name = find_corruption(temporary, step) is None and find_corruption(final, step) is not None
    if lacks_its_name:
        rename_durably(temporary, final)
    return lacks_its_name


def rename_durably(temporary: Path, final: Path) -> None:
    """Make what is whole in `temporary` the checkpoint at `final`."""
    shutil.rmtree(final, ignore_errors=True)  # of a step that is written again; from here `temporary` alone is whole
    os.replace(temporary, final)
    fsync_path(final.parent)


def update_metadata(folder: Path, facts: Mapping[str, JsonValue]) -> None:
    """Add facts to the manifest of a checkpoint, whose files stay as they are."""
    file, temporary = folder / MANIFEST_FILE, folder / f".{MANIFEST_FILE}"
    temporary.write_bytes(with_metadata(Manifest.model_validate_json(file.read_bytes()), facts).to_bytes())
    fsync_path(temporary)
    os.replace(temporary, file)
    fsync_path(folder)


def with_metadata(manifest: Manifest, facts: Mapping[str, JsonValue]) -> Manifest:
    return manifest.model_copy(update={"facts": {**manifest.facts, **facts}})


def find_corruption(folder: Path, step: int) -> str | None:
    """What is wrong with the folder of the checkpoint of `step`, or None when it is whole."""
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST_FILE).read_bytes())
    except FileNotFoundError:
        return "has no manifest"
    except ValidationError:
        return "has an unreadable manifest"
    if manifest.facts.get("step") != step:
        return "has the manifest of another step"
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as hashing:  # nothing trains meanwhile, and it waits for this
        return next(filter(None, hashing.map(partial(find_file_corruption, folder), manifest.files)), None)


def read_content_digest(folder: Path) -> str:
    """What a checkpoint is made of, by its manifest: the same on every machine, whatever was told of it since, and whatever
    share of it lies there. Empty where there is no checkpoint.
    """
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST_FILE).read_bytes())
    except (FileNotFoundError, ValidationError):
        return ""
    part = part_from_manifest(manifest)
    return part.save if part else hash_checkpoint_files(manifest)


def hash_checkpoint_files(manifest: Manifest) -> str:
    """Of the files of a checkpoint."""
    return Manifest(kind=CHECKPOINT_KIND, files=manifest.files).digest


def checkpoint_file_bytes(folder: Path) -> int:
    """Bytes of a checkpoint's files, by its manifest."""
    return Manifest.model_validate_json((folder / MANIFEST_FILE).read_bytes()).size_bytes


def free_disk_bytes(folder: Path) -> int:
    """What its disk has left for us."""
    return shutil.disk_usage(folder).free


def fsync_path(path: Path) -> None:
    """fsync a file or a folder: a rename must never reach the disk before what it names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
