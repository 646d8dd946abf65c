"""Compare two versions of a dataset: records by their hashes, schema, statistics.

Memory use is 16 bytes per record, or 32 with a key; texts are not kept.
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from recipes.contracts.quantities import pluralize
from recipes.records.conversation import ORDERED_KEYS
from recipes.records.fingerprint import to_canonical_line
from recipes.records.record_reader import iterate_record_lines
from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Artifact, canonical_json
from resources.errors import invalid
from resources.ingest.column_schema import SchemaCounter
from resources.metadata.datasets import DatasetVersion

HASH_DTYPE = np.dtype("S16")
"""15 bytes of hash and a last byte that is never zero, because numpy strips trailing zeros as padding."""
MAX_EXAMPLES = 5
ORDERED_KEY = re.compile(rf'"(?:{"|".join(ORDERED_KEYS)})":'.encode())
"""Matches lines whose stored form may differ from the canonical one."""
Hashes = NDArray[np.bytes_]


@dataclass(frozen=True)
class VersionStatistics:
    reference: str
    num_records: int
    size_bytes: int
    columns: Any


@dataclass(frozen=True)
class Diff:
    """The difference from `old` to `new`.

    `changed` counts records with the same key and other content; None without a key. `examples` has the first few lines of
    each kind, from the version that contains them. Schemas map columns to type names.
    """

    old: VersionStatistics
    new: VersionStatistics
    added: int
    removed: int
    changed: int | None
    unchanged: int
    schema_added: dict[str, str]
    schema_removed: dict[str, str]
    schema_changed: dict[str, tuple[str, str]]
    examples: dict[str, list[Any]]


def diff_versions(store: Store, old: DatasetVersion, new: DatasetVersion, key: str | None = None) -> Diff:
    """Compare two versions. Without a key, a record that occurs twice counts as two records.

    Raises:
        HanzoError: `key` is not a column in which every record has a unique value.
    """
    before, after = (hash_records(store, version, key) for version in (old, new))
    if key is None:
        removed, added = surplus_positions(before.records, after.records), surplus_positions(after.records, before.records)
        changed: NDArray[np.intp] | None = None
    else:
        removed, added = missing_positions(before.keys, after.keys), missing_positions(after.keys, before.keys)
        altered = missing_positions(after.records, before.records)
        changed = np.setdiff1d(altered, added)
    count = len(after.records) - len(added) - (0 if changed is None else len(changed))
    shared = old.schema.keys() & new.schema.keys()
    return Diff(
        old=VersionStatistics(old.reference, old.num_records, old.size_bytes, before.columns),
        new=VersionStatistics(new.reference, new.num_records, new.size_bytes, after.columns),
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
            "added": read_examples(store, new.artifact, added),
            "removed": read_examples(store, old.artifact, removed),
            **({} if changed is None else {"changed": read_examples(store, new.artifact, changed)}),
        },
    )


@dataclass(frozen=True)
class RecordHashes:
    """Hashes in the order of the records; `keys` is empty without a key.

    `columns` counts the types in each column.
    """

    records: Hashes
    keys: Hashes
    columns: Any


def hash_records(store: Store, version: DatasetVersion, key: str | None) -> RecordHashes:
    records, keys = bytearray(), bytearray()
    columns: Any = store.manifest(version.artifact).facts.get("columns")
    schema = SchemaCounter() if columns is None else None  # the columns of a prepared version have not been counted
    for number, line in enumerate(iterate_record_lines(store, version.artifact), start=1):
        holds_order = ORDERED_KEY.search(line) is not None
        row = msgspec.json.decode(line) if key is not None or schema is not None or holds_order else {}
        # A record whose tools have their keys in another order is the same record.
        records += hash_bytes(to_canonical_line(row, line.removesuffix(b"\n")) + b"\n" if holds_order else line)
        if schema is not None:
            schema.count(row)
        if key is not None:
            if key not in row:
                raise invalid(f"record {number} of {version.reference} has no '{key}': give a key that every record has")
            keys += hash_bytes(canonical_json(row[key]))
    columns = columns if schema is None else schema.counts()
    found = RecordHashes(np.frombuffer(records, HASH_DTYPE), np.frombuffer(keys, HASH_DTYPE), columns)
    if key is not None and (doubles := len(found.keys) - len(np.unique(found.keys))):
        raise invalid(
            f"'{key}' of {pluralize(doubles, 'record')} of {version.reference} is that of another: give a key that is unique"
        )
    return found


def hash_bytes(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=HASH_DTYPE.itemsize - 1).digest() + b"\1"


def missing_positions(left_hashes: Hashes, right_hashes: Hashes) -> NDArray[np.intp]:
    """Return the positions of hashes in `left_hashes` that are not in `right_hashes`."""
    return np.flatnonzero(~np.isin(left_hashes, right_hashes))


def surplus_positions(left_hashes: Hashes, right_hashes: Hashes) -> NDArray[np.intp]:
    """Return the positions of hashes that `left_hashes` has more often.

    Only the occurrences in excess of those in `right_hashes` are returned.
    """
    order = np.argsort(left_hashes, kind="stable")
    ordered = left_hashes[order]
    first = np.searchsorted(ordered, ordered, side="left")
    occurrence = np.arange(len(ordered)) - first
    others = np.sort(right_hashes)
    other_counts = np.searchsorted(others, ordered, side="right") - np.searchsorted(others, ordered, side="left")
    return np.sort(order[occurrence >= other_counts])


def read_examples(store: Store, artifact: Artifact, positions: NDArray[np.intp]) -> list[Any]:
    """Return the records at the first few positions."""
    wanted = {int(position) for position in positions[:MAX_EXAMPLES]}
    if not wanted:
        return []
    lines: Iterator[bytes] = islice(iterate_record_lines(store, artifact), max(wanted) + 1)
    return [msgspec.json.decode(line) for position, line in enumerate(lines) if position in wanted]
