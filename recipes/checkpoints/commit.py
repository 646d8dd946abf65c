"""One checkpoint as a local folder: how it becomes whole, and how to tell whether it is."""

import os
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from pydantic import JsonValue, ValidationError

from recipes.checkpoints.node_parts import part_of
from recipes.storage.artifact_store import MANIFEST, describe, what_is_broken
from recipes.storage.manifest import Manifest

KIND = "checkpoint"


def seal(scratch: Path, target: Path, facts: Mapping[str, JsonValue]) -> None:
    """Make what was written to `scratch` the checkpoint at `target`: hashes, the manifest last, and then its name.

    All of it is on the disk before it has that name. It takes about as long as reading and writing it all once.
    """
    manifest = Manifest(kind=KIND, files=describe(scratch), facts={**facts, "step": int(target.name)})
    (scratch / MANIFEST).write_bytes(manifest.to_bytes())
    for path in (*scratch.rglob("*"), scratch):  # the folder too: a file that it does not name yet is gone with the power
        flush_to_disk(path)
    give_name(scratch, target)


def finish(scratch: Path, target: Path) -> bool:
    """Give a checkpoint its name where a kill came between: all of it lies in `scratch`, and nothing whole at `target`."""
    step = int(target.name)
    lacks_its_name = broken(scratch, step) is None and broken(target, step) is not None
    if lacks_its_name:
        give_name(scratch, target)
    return lacks_its_name


def give_name(scratch: Path, target: Path) -> None:
    """Make what is whole in `scratch` the checkpoint at `target`."""
    shutil.rmtree(target, ignore_errors=True)  # of a step that is written again; from here `scratch` alone is whole
    os.replace(scratch, target)
    flush_to_disk(target.parent)


def tell(folder: Path, facts: Mapping[str, JsonValue]) -> None:
    """Add facts to the manifest of a checkpoint, whose files stay as they are."""
    file, scratch = folder / MANIFEST, folder / f".{MANIFEST}"
    scratch.write_bytes(with_facts(Manifest.model_validate_json(file.read_bytes()), facts).to_bytes())
    flush_to_disk(scratch)
    os.replace(scratch, file)
    flush_to_disk(folder)


def with_facts(manifest: Manifest, facts: Mapping[str, JsonValue]) -> Manifest:
    return manifest.model_copy(update={"facts": {**manifest.facts, **facts}})


def broken(folder: Path, step: int) -> str | None:
    """What is wrong with the folder of the checkpoint of `step`, or None when it is whole."""
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        return "has no manifest"
    except ValidationError:
        return "has an unreadable manifest"
    if manifest.facts.get("step") != step:
        return "has the manifest of another step"
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as hashing:  # nothing trains meanwhile, and it waits for this
        return next(filter(None, hashing.map(partial(what_is_broken, folder), manifest.files)), None)


def content_of(folder: Path) -> str:
    """What a checkpoint is made of, by its manifest: the same on every machine, whatever was told of it since, and whatever
    share of it lies there. Empty where there is no checkpoint.
    """
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
    except (FileNotFoundError, ValidationError):
        return ""
    part = part_of(manifest)
    return part.save if part else digest_of(manifest)


def digest_of(whole: Manifest) -> str:
    """Of the files of a checkpoint."""
    return Manifest(kind=KIND, files=whole.files).digest


def size_of(folder: Path) -> int:
    """Bytes of a checkpoint's files, by its manifest."""
    return Manifest.model_validate_json((folder / MANIFEST).read_bytes()).size_bytes


def free_bytes(folder: Path) -> int:
    """What its disk has left for us."""
    return shutil.disk_usage(folder).free


def flush_to_disk(path: Path) -> None:
    """fsync a file or a folder: a rename must never reach the disk before what it names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
