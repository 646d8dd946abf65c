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

# Select the files of a checkpoint that a machine needs: for sharded weights, those with its own rows.
#
# A checkpoint of a 72B model is 864 GB. Fetching all of it on each of four machines would need such disks, and training
# could not start within five minutes.

ROWS_MARKER = "-rows-"
"""Marks names of files with a part of the rows of tensors; separates their kind from their rank."""
PLACES_KEY = "places"
"""Metadata key in such files for the first row and the total number of rows of each tensor. A single key, because
safetensors writes several in any order, which gave equal rows unequal files.
"""
OPTIMIZER_PREFIX = "optimizer"

MAX_HEADER_BYTES = 100_000_000
"""The library's limit. Corrupt files may state any size."""


class HeaderMetadata(BaseModel):
    places: Json[dict[str, tuple[int, int]]] = Field(default={}, alias=PLACES_KEY)


class TensorHeader(BaseModel):
    shape: tuple[int, ...]


class SafetensorsHeader(BaseModel, extra="allow"):
    """Header of a safetensors file: tensors by name, and metadata."""

    metadata: HeaderMetadata = Field(default=HeaderMetadata(), alias="__metadata__")
    __pydantic_extra__: dict[str, TensorHeader]


class TensorRows(NamedTuple):
    """Rows of a tensor in one file.

    A scalar has no rows, and `total` is 0.
    """

    path: str
    first: int
    rows: int
    total: int


@dataclass(frozen=True)
class NodeShard:
    """The shard of machine `number` (from 1) `of` several equal ones with `processes_per_node` processes each."""

    number: int
    of: int
    processes_per_node: int

    def label_content(self, content: str) -> str:
        """Return an identifier of shards that together form a checkpoint with this content."""
        return content

    @property
    def ranks(self) -> range:
        return range((self.number - 1) * self.processes_per_node, self.number * self.processes_per_node)

    def files(self, manifest: Manifest, headers: Callable[[Sequence[str]], Iterable[SafetensorsHeader]]) -> set[str]:
        """Return the paths of files that this machine needs; `headers` reads the headers of files.

        All files if they do not state their rows, as in earlier versions or other strategies.
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
            if needed.isdisjoint(part.path for part in parts):  # a scalar is equal in all files that contain it
                needed.add(min(part.path for part in parts))
        return needed

    def needs_rows(self, part: TensorRows) -> bool:
        """Return whether a process of this machine needs rows of a file."""
        processes = self.of * self.processes_per_node
        own = (shard_rows(part.total, rank, processes) for rank in self.ranks)
        return any(max(rows.start, part.first) < min(rows.stop, part.first + part.rows) for rows in own)


class AllWeights(NodeShard):
    """All weights of all machines, for publishing."""

    def label_content(self, content: str) -> str:
        """Differs from the identifiers of shards, because the two do not form a whole."""
        return f"weights of {content}"

    def files(self, manifest: Manifest, headers: Callable[[Sequence[str]], Iterable[SafetensorsHeader]]) -> set[str]:
        return {file.path for file in manifest.files if not file.path.startswith(OPTIMIZER_PREFIX + ROWS_MARKER)}


def list_tensor_rows(path: str, header: SafetensorsHeader) -> Iterable[tuple[str, TensorRows | None]]:
    """Yield each tensor's rows in a file; None if the file does not state them."""
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
    """Return the rows of a process in an FSDP2-sharded tensor.

    Equal numbers, fewer or none at the end.
    """
    each = -(-total // processes)
    return range(min(total, each * rank), min(total, each * (rank + 1)))


def read_safetensors_header(read: Callable[[int, int], bytes]) -> SafetensorsHeader:
    """Read a safetensors header; `read` returns the bytes between two offsets.

    Raises:
        ValidationError: it is no such file.
    """
    size = int.from_bytes(read(0, 8), "little")
    return SafetensorsHeader.model_validate_json(read(8, 8 + min(size, MAX_HEADER_BYTES)))


# A checkpoint saved by several machines: each uploads its part, and the last one to arrive completes it.
#
# Machines do not wait for each other and only communicate through the store, so that a part counts even if its machine is
# lost. Locally a part is a checkpoint whose manifest marks it as a part. In the store, the manifests of uploaded parts are
# next to the files until all have arrived.

PART_KEY = "part"
"""Manifest fact that identifies a part; absent in complete checkpoints."""
PARTS_FOLDER = "parts"
"""Folder of the parts' manifests in an incomplete checkpoint."""


class CheckpointPart(FrozenModel):
    """Identifies a part of a checkpoint.

    Attributes:
        number: counts from 1, the leader's machine.
        of: number of parts.
        save: unique per save of a step: parts of different saves do not form a checkpoint, although steps and names are
            equal. For a fetched share, the content of the whole.
    """

    number: int
    of: int
    save: str


def part_from_manifest(manifest: Manifest) -> CheckpointPart | None:
    """Return the part that a manifest describes, or None for a complete checkpoint."""
    found = manifest.facts.get(PART_KEY)
    return CheckpointPart.model_validate(found) if found else None


def part_in_folder(folder: Path) -> CheckpointPart | None:
    """Return the part in a folder; None for a complete checkpoint or none."""
    try:
        return part_from_manifest(Manifest.model_validate_json((folder / MANIFEST_FILE).read_bytes()))
    except (FileNotFoundError, ValidationError):
        return None


def upload_part(store: Store, folder: Path, uri: str, manifest: Manifest, part: CheckpointPart) -> None:
    """Upload the part in `folder`; the last part completes the checkpoint.

    Two parts that arrive at once may both be last; they write the same manifest.
    """
    store.put_files(folder, uri, manifest)
    store.put_bytes(f"{uri}/{PARTS_FOLDER}/{part.number}-of-{part.of}.json", manifest.to_bytes())
    assemble_if_complete(store, uri, part)


def assemble_if_complete(store: Store, uri: str, one: CheckpointPart) -> None:
    """Commit the checkpoint if all parts of the save of `one` have arrived."""
    if whole := join_parts(list_uploaded_parts(store, uri), one):
        store.put_manifest(uri, whole)
        store.delete(f"{uri}/{PARTS_FOLDER}")
        store.remove_empty_folders(f"{uri}/{PARTS_FOLDER}")


def list_uploaded_parts(store: Store, uri: str) -> list[Manifest]:
    """Return the manifests of uploaded parts of an incomplete checkpoint."""
    found = []
    for name in store.list(f"{uri}/{PARTS_FOLDER}"):
        with suppress(FileNotFoundError, ValidationError):  # completed by another machine, or no manifest
            found.append(Manifest.model_validate_json(store.get_bytes(name)))
    return found


def join_parts(parts: Iterable[Manifest], one: CheckpointPart) -> Manifest | None:
    """Return the manifest of the complete checkpoint that `one` is a part of.

    None if parts are missing.
    """
    found = {part.number: manifest for manifest in parts if (part := part_from_manifest(manifest)) and part.save == one.save}
    if len(found) < one.of:
        return None
    leading = found[1]
    files = {file.path: file for manifest in found.values() for file in manifest.files}  # shares may overlap
    facts = {name: fact for name, fact in leading.facts.items() if name != PART_KEY}
    return Manifest(kind=leading.kind, files=tuple(files[path] for path in sorted(files)), facts=facts)
