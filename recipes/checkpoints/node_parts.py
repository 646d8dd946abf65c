"""A checkpoint that several machines have saved: each uploads its part, and the last that arrives makes a whole of them.

No machine waits for another, and all that they have to know of each other is in the store: what one has put there counts
though it is gone since. On its machine a part is a checkpoint like others, whose manifest says that it is a part. In the
store the manifests of those that have arrived lie beside the files, until all have (specification row Z16).
"""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from recipes.contracts.frozen_model import FrozenModel
from recipes.storage.artifact_store import MANIFEST_FILE, Store
from recipes.storage.manifest import Manifest

PART_KEY = "part"
"""The fact in a manifest that says which part it is of; that of a whole checkpoint has none."""
PARTS_FOLDER = "parts"
"""The folder of the parts' manifests, among the files of a checkpoint that is not whole yet."""


class CheckpointPart(FrozenModel):
    """`number` counts from 1, which is the leader's machine. `save` is another one each time that a step is saved: parts of
    two times are no checkpoint, though their steps and their names are the same. Of a share that was fetched, it is what the
    whole is made of.
    """

    number: int
    of: int
    save: str


def part_from_manifest(manifest: Manifest) -> CheckpointPart | None:
    """Which part a manifest is of; None of a whole checkpoint."""
    found = manifest.facts.get(PART_KEY)
    return CheckpointPart.model_validate(found) if found else None


def part_in_folder(folder: Path) -> CheckpointPart | None:
    """Which part lies in a folder; None where a whole checkpoint does, or none."""
    try:
        return part_from_manifest(Manifest.model_validate_json((folder / MANIFEST_FILE).read_bytes()))
    except (FileNotFoundError, ValidationError):
        return None


def upload_part(store: Store, folder: Path, uri: str, manifest: Manifest, part: CheckpointPart) -> None:
    """Upload the part that lies in `folder`; with the last, there is the checkpoint.

    Two that arrive at once may both be the last. They write the same.
    """
    store.put_files(folder, uri, manifest)
    store.put_bytes(f"{uri}/{PARTS_FOLDER}/{part.number}-of-{part.of}.json", manifest.to_bytes())
    assemble_if_complete(store, uri, part)


def assemble_if_complete(store: Store, uri: str, one: CheckpointPart) -> None:
    """Where all parts have arrived that belong to `one`, they are the checkpoint from here on."""
    if whole := join_parts(list_uploaded_parts(store, uri), one):
        store.put_manifest(uri, whole)
        store.delete(f"{uri}/{PARTS_FOLDER}")
        store.remove_empty_folders(f"{uri}/{PARTS_FOLDER}")


def list_uploaded_parts(store: Store, uri: str) -> list[Manifest]:
    """Those that have arrived of a checkpoint that is not whole."""
    found = []
    for name in store.list(f"{uri}/{PARTS_FOLDER}"):
        with suppress(FileNotFoundError, ValidationError):  # the last has come meanwhile; or it is no manifest
            found.append(Manifest.model_validate_json(store.get_bytes(name)))
    return found


def join_parts(parts: Iterable[Manifest], one: CheckpointPart) -> Manifest | None:
    """The manifest of the whole that `one` is a part of; None while another is missing."""
    found = {part.number: manifest for manifest in parts if (part := part_from_manifest(manifest)) and part.save == one.save}
    if len(found) < one.of:
        return None
    leading = found[1]
    files = {file.path: file for manifest in found.values() for file in manifest.files}  # of shares, some are in several
    facts = {name: fact for name, fact in leading.facts.items() if name != PART_KEY}
    return Manifest(kind=leading.kind, files=tuple(files[path] for path in sorted(files)), facts=facts)
