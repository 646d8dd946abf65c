"""A checkpoint that several machines have saved: each uploads its part, and the last that arrives makes a whole of them.

No machine waits for another, and all that they have to know of each other is in the store: what one has put there counts
though it is gone since. On its machine a part is a checkpoint like others, whose manifest says that it is a part. In the
store the manifests of those that have arrived lie beside the files, until all have (specification row Z16).
"""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from recipes.contracts.frozen_model import Frozen
from recipes.storage.artifact_store import MANIFEST, Store
from recipes.storage.manifest import Manifest

PART = "part"
"""The fact in a manifest that says which part it is of; that of a whole checkpoint has none."""
PARTS = "parts"
"""The folder of the parts' manifests, among the files of a checkpoint that is not whole yet."""


class Part(Frozen):
    """`number` counts from 1, which is the leader's machine. `save` is another one each time that a step is saved: parts of
    two times are no checkpoint, though their steps and their names are the same. Of a share that was fetched, it is what the
    whole is made of.
    """

    number: int
    of: int
    save: str


def part_of(manifest: Manifest) -> Part | None:
    """Which part a manifest is of; None of a whole checkpoint."""
    found = manifest.facts.get(PART)
    return Part.model_validate(found) if found else None


def part_in(folder: Path) -> Part | None:
    """Which part lies in a folder; None where a whole checkpoint does, or none."""
    try:
        return part_of(Manifest.model_validate_json((folder / MANIFEST).read_bytes()))
    except (FileNotFoundError, ValidationError):
        return None


def put_part(store: Store, folder: Path, uri: str, manifest: Manifest, part: Part) -> None:
    """Upload the part that lies in `folder`; with the last, there is the checkpoint.

    Two that arrive at once may both be the last. They write the same.
    """
    store.put_files(folder, uri, manifest)
    store.put_bytes(f"{uri}/{PARTS}/{part.number}-of-{part.of}.json", manifest.to_bytes())
    make_whole(store, uri, part)


def make_whole(store: Store, uri: str, one: Part) -> None:
    """Where all parts have arrived that belong to `one`, they are the checkpoint from here on."""
    if whole := joined(parts_at(store, uri), one):
        store.put_manifest(uri, whole)
        store.delete(f"{uri}/{PARTS}")
        store.remove_empty_folders(f"{uri}/{PARTS}")


def parts_at(store: Store, uri: str) -> list[Manifest]:
    """Those that have arrived of a checkpoint that is not whole."""
    found = []
    for name in store.list(f"{uri}/{PARTS}"):
        with suppress(FileNotFoundError, ValidationError):  # the last has come meanwhile; or it is no manifest
            found.append(Manifest.model_validate_json(store.get_bytes(name)))
    return found


def joined(parts: Iterable[Manifest], one: Part) -> Manifest | None:
    """The manifest of the whole that `one` is a part of; None while another is missing."""
    found = {part.number: manifest for manifest in parts if (part := part_of(manifest)) and part.save == one.save}
    if len(found) < one.of:
        return None
    leading = found[1]
    files = {file.path: file for manifest in found.values() for file in manifest.files}  # of shares, some are in several
    facts = {name: fact for name, fact in leading.facts.items() if name != PART}
    return Manifest(kind=leading.kind, files=tuple(files[path] for path in sorted(files)), facts=facts)
