"""One checkpoint as a local folder: how it becomes whole, and how to tell whether it is."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from pydantic import JsonValue, ValidationError

from recipes.schema import Manifest
from recipes.store import MANIFEST, describe, what_is_broken

KIND = "checkpoint"


def seal(scratch: Path, target: Path, facts: Mapping[str, JsonValue]) -> Manifest:
    """Make what was written to `scratch` the checkpoint at `target`: hashes, the manifest last, and then its name.

    All of it is on the disk before it has that name. It takes about as long as reading and writing it all once.
    """
    manifest = Manifest(kind=KIND, files=describe(scratch), facts={**facts, "step": int(target.name)})
    (scratch / MANIFEST).write_bytes(manifest.to_bytes())
    for file in scratch.rglob("*"):
        flush_to_disk(file)
    if target.exists():
        shutil.rmtree(target)
    os.replace(scratch, target)
    flush_to_disk(target.parent)
    return manifest


def tell(folder: Path, facts: Mapping[str, JsonValue]) -> None:
    """Add facts to the manifest of a checkpoint, whose files stay as they are."""
    file, scratch = folder / MANIFEST, folder / f".{MANIFEST}"
    scratch.write_bytes(with_facts(Manifest.model_validate_json(file.read_bytes()), facts).to_bytes())
    flush_to_disk(scratch)
    os.replace(scratch, file)
    flush_to_disk(folder)


def with_facts(manifest: Manifest, facts: Mapping[str, JsonValue]) -> Manifest:
    return manifest.model_copy(update={"facts": {**manifest.facts, **facts}})


def broken(folder: Path) -> str | None:
    """What is wrong with a checkpoint folder, or None when it is whole."""
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        return "has no manifest"
    except ValidationError:
        return "has an unreadable manifest"
    if manifest.facts.get("step") != int(folder.name):
        return "has the manifest of another step"
    return next(filter(None, (what_is_broken(folder, file) for file in manifest.files)), None)


def flush_to_disk(path: Path) -> None:
    """fsync a file or a folder: a rename must never reach the disk before what it names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
