"""What changed from one version of a dataset to another: records by their hashes, schema, statistics.

Memory holds 16 bytes for each record, or 32 where records have a key, and never their texts.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from recipes.canonical_json import canonical_json
from recipes.counted import counted
from recipes.record_lines import record_lines
from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Artifact
from resources.errors import invalid
from resources.ingest.column_schema import SchemaOfMany
from resources.metadata.datasets import DatasetVersion

HASH = np.dtype("S16")
"""15 bytes of hash and a last one that is never zero: numpy takes zeros at the end for padding."""
SHOWN = 5
Hashes = NDArray[np.bytes_]


@dataclass(frozen=True)
class Statistics:
    reference: str
    num_records: int
    size_bytes: int
    columns: Any


@dataclass(frozen=True)
class Diff:
    """From `old` to `new`. `changed` counts records with one key and another content; it is None where no key was given.

    Of each kind, `examples` has the first few lines of the version that holds them. Schemas map a column to type names.
    """

    old: Statistics
    new: Statistics
    added: int
    removed: int
    changed: int | None
    unchanged: int
    schema_added: dict[str, str]
    schema_removed: dict[str, str]
    schema_changed: dict[str, tuple[str, str]]
    examples: dict[str, list[Any]]


def diff(store: Store, old: DatasetVersion, new: DatasetVersion, key: str | None = None) -> Diff:
    """Compare two versions. Without a key, a record that occurs twice is two records.

    Raises:
        HanzoError: `key` is no column that every record has with a value of its own.
    """
    before, after = (hashes_of(store, version, key) for version in (old, new))
    if key is None:
        removed, added = surplus(before.records, after.records), surplus(after.records, before.records)
        changed: NDArray[np.intp] | None = None
    else:
        removed, added = missing(before.keys, after.keys), missing(after.keys, before.keys)
        altered = missing(after.records, before.records)
        changed = np.setdiff1d(altered, added)
    count = len(after.records) - len(added) - (0 if changed is None else len(changed))
    shared = old.schema.keys() & new.schema.keys()
    return Diff(
        old=Statistics(old.reference, old.num_records, old.size_bytes, before.columns),
        new=Statistics(new.reference, new.num_records, new.size_bytes, after.columns),
        added=len(added),
        removed=len(removed),
        changed=None if changed is None else len(changed),
        unchanged=count,
        schema_added={column: new.schema[column] for column in sorted(new.schema.keys() - shared)},
        schema_removed={column: old.schema[column] for column in sorted(old.schema.keys() - shared)},
        schema_changed={
            column: (old.schema[column], new.schema[column])
            for column in sorted(shared)
            if old.schema[column] != new.schema[column]
        },
        examples={
            "added": lines_at(store, new.artifact, added),
            "removed": lines_at(store, old.artifact, removed),
            **({} if changed is None else {"changed": lines_at(store, new.artifact, changed)}),
        },
    )


@dataclass(frozen=True)
class RecordHashes:
    """In the order of the records. `keys` is empty where none was asked for. `columns`: how many have which type in each."""

    records: Hashes
    keys: Hashes
    columns: Any


def hashes_of(store: Store, version: DatasetVersion, key: str | None) -> RecordHashes:
    records, keys = bytearray(), bytearray()
    columns: Any = store.manifest(version.artifact).facts.get("columns")
    schema = SchemaOfMany() if columns is None else None  # of a version that was prepared nobody has counted them
    for number, line in enumerate(record_lines(store, version.artifact), start=1):
        records += hashed(line)
        row = msgspec.json.decode(line) if key is not None or schema is not None else {}
        if schema is not None:
            schema.see(row)
        if key is not None:
            if key not in row:
                raise invalid(f"record {number} of {version.reference} has no '{key}': give a key that every record has")
            keys += hashed(canonical_json(row[key]))
    columns = columns if schema is None else schema.counts()
    found = RecordHashes(np.frombuffer(records, HASH), np.frombuffer(keys, HASH), columns)
    if key is not None and (doubles := len(found.keys) - len(np.unique(found.keys))):
        raise invalid(
            f"'{key}' of {counted(doubles, 'record')} of {version.reference} is that of another: give a key that is unique"
        )
    return found


def hashed(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=HASH.itemsize - 1).digest() + b"\1"


def missing(these: Hashes, those: Hashes) -> NDArray[np.intp]:
    """Positions of what is in `these` and not in `those`."""
    return np.flatnonzero(~np.isin(these, those))


def surplus(these: Hashes, those: Hashes) -> NDArray[np.intp]:
    """Positions of what is in `these` more often than in `those`, each time that it is."""
    order = np.argsort(these, kind="stable")
    ordered = these[order]
    first = np.searchsorted(ordered, ordered, side="left")
    occurrence = np.arange(len(ordered)) - first
    others = np.sort(those)
    there = np.searchsorted(others, ordered, side="right") - np.searchsorted(others, ordered, side="left")
    return np.sort(order[occurrence >= there])


def lines_at(store: Store, artifact: Artifact, positions: NDArray[np.intp]) -> list[Any]:
    """The records at the first few positions."""
    wanted = {int(position) for position in positions[:SHOWN]}
    if not wanted:
        return []
    lines: Iterator[bytes] = islice(record_lines(store, artifact), max(wanted) + 1)
    return [msgspec.json.decode(line) for position, line in enumerate(lines) if position in wanted]
