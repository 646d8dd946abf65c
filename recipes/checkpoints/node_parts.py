"""Save checkpoints in one part per node, and select the shards each node fetches."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, Field, Json, ValidationError

from recipes.contracts.frozen_model import FrozenModel
from recipes.storage.artifact_store import MANIFEST_FILE, Store
from recipes.storage.manifest import Manifest

# Which files of a checkpoint a machine needs: of weights that are spread over all machines, those with its own rows.
#
# Of 72B parameters a checkpoint is 864 GB. Four machines that each fetched all of it, and had a disk for that, would not
# train within five minutes (specification row I10).

ROWS_MARKER = "-rows-"
"""In the name of a file that has some of the rows of tensors, between what they are and whose."""
PLACES_KEY = "places"
"""In the metadata of such a file, by tensor: the number of the first of its rows, and how many there are in all files. One
entry for both: safetensors writes several in any order, and equal rows were in unequal files.
"""
OPTIMIZER_PREFIX = "optimizer"

MAX_HEADER_BYTES = 100_000_000
"""In bytes; the library takes none that is longer. What is spoiled may say any number."""


class HeaderMetadata(BaseModel):
    places: Json[dict[str, tuple[int, int]]] = Field(default={}, alias=PLACES_KEY)


class TensorHeader(BaseModel):
    shape: tuple[int, ...]


class SafetensorsHeader(BaseModel, extra="allow"):
    """Of a safetensors file: its tensors by their names, beside the metadata."""

    metadata: HeaderMetadata = Field(default=HeaderMetadata(), alias="__metadata__")
    __pydantic_extra__: dict[str, TensorHeader]


class TensorRows(NamedTuple):
    """What one file has of a tensor. One that is a number has no rows, and `total` is 0."""

    path: str
    first: int
    rows: int
    total: int


@dataclass(frozen=True)
class NodeShard:
    """Of machine `number`, the first of which is 1, `of` so many that train alike, with as many processes
    `processes_per_node`.
    """

    number: int
    of: int
    processes_per_node: int

    def label_content(self, content: str) -> str:
        """What tells this share, and those of the other machines, of a checkpoint with that content."""
        return content

    @property
    def ranks(self) -> range:
        return range((self.number - 1) * self.processes_per_node, self.number * self.processes_per_node)

    def files(self, manifest: Manifest, headers: Callable[[Sequence[str]], Iterable[SafetensorsHeader]]) -> set[str]:
        """Paths of those that this machine reads as it goes on; `headers` are those of the files at some paths.

        All, where files do not say which rows they have: of an earlier version, or of another strategy.
        """
        paths = {file.path for file in manifest.files}
        sharded_paths = [path for path in paths if ROWS_MARKER in path]
        tensors: dict[tuple[str, str], list[TensorRows]] = defaultdict(list)
        for path, header in zip(sharded_paths, headers(sharded_paths), strict=True):
            for name, held in list_tensor_rows(path, header):
                if held is None:
                    return paths
                tensors[path.partition(ROWS_MARKER)[0], name].append(held)
        needed = paths.difference(sharded_paths)
        for parts in tensors.values():
            needed |= {part.path for part in parts if self.needs_rows(part)}
        for parts in tensors.values():
            if needed.isdisjoint(part.path for part in parts):  # a number that all have alike is in one of them, or in all
                needed.add(min(part.path for part in parts))
        return needed

    def needs_rows(self, part: TensorRows) -> bool:
        """Whether a process of this machine has rows that a file has."""
        processes = self.of * self.processes_per_node
        own = (shard_rows(part.total, rank, processes) for rank in self.ranks)
        return any(max(rows.start, part.first) < min(rows.stop, part.first + part.rows) for rows in own)


class AllWeights(NodeShard):
    """What is published of a run: all weights, of all machines."""

    def label_content(self, content: str) -> str:
        """Beside shares it makes no whole."""
        return f"weights of {content}"

    def files(self, manifest: Manifest, headers: Callable[[Sequence[str]], Iterable[SafetensorsHeader]]) -> set[str]:
        return {file.path for file in manifest.files if not file.path.startswith(OPTIMIZER_PREFIX + ROWS_MARKER)}


def list_tensor_rows(path: str, header: SafetensorsHeader) -> Iterable[tuple[str, TensorRows | None]]:
    """What a file has of each of its tensors; None where it does not say which rows these are."""
    places = header.metadata.places
    for name, tensor in header.__pydantic_extra__.items():
        if not tensor.shape:
            yield name, TensorRows(path, 0, 0, 0)
        elif name in places:
            first, total = places[name]
            yield name, TensorRows(path, first, tensor.shape[0], total)
        else:
            yield name, None


def shard_rows(total: int, rank: int, processes: int) -> range:
    """The rows that a process holds where FSDP2 has spread a tensor: equally many each, fewer or none at the end."""
    each = -(-total // processes)
    return range(min(total, each * rank), min(total, each * (rank + 1)))


def read_safetensors_header(read: Callable[[int, int], bytes]) -> SafetensorsHeader:
    """That of a safetensors file of which `read` gives the bytes from one place to another.

    Raises:
        ValidationError: it is no such file.
    """
    size = int.from_bytes(read(0, 8), "little")
    return SafetensorsHeader.model_validate_json(read(8, 8 + min(size, MAX_HEADER_BYTES)))


# A checkpoint that several machines have saved: each uploads its part, and the last that arrives makes a whole of them.
#
# No machine waits for another, and all that they have to know of each other is in the store: what one has put there
# counts though it is gone since. On its machine a part is a checkpoint like others, whose manifest says that it is a
# part. In the store the manifests of those that have arrived lie beside the files, until all have (specification row
# Z16).

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
