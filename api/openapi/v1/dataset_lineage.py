"""Where a dataset version came from, what changed in it, and where its records went (rows B8-B10)."""

from typing import Any

import msgspec

from api.schemas.mlflow.responses import Message


class DiffedVersion(Message):
    """`columns` maps a column to how many records have which type in it."""

    reference: str
    num_records: int
    size_bytes: int
    columns: dict[str, dict[str, int]]


class DiffExamples(Message):
    """The first few records of each kind; `changed` where a key was given."""

    added: list[Any]
    removed: list[Any]
    changed: list[Any] | msgspec.UnsetType = msgspec.UNSET


class DatasetDiff(Message):
    """From `old` to `new`. `changed` is null where no key was given. Schemas map a column to type names."""

    old: DiffedVersion
    new: DiffedVersion
    added: int
    removed: int
    changed: int | None
    unchanged: int
    schema_added: dict[str, str]
    schema_removed: dict[str, str]
    schema_changed: dict[str, tuple[str, str]]
    examples: DiffExamples


class LineageNode(Message):
    """`name` says what it is in words that a user knows."""

    name: str
    kind: str
    uri: str
    digest: str


class DatasetLineage(Message):
    """`made_from` begins with the nearest; `children` are versions, `made_into` all else that came of it."""

    dataset: str
    parents: list[str]
    transform: Any
    origins: list[str]
    made_from: list[LineageNode]
    children: list[str]
    made_into: list[LineageNode]


class TraceNode(Message):
    """One thing that a record reached, and what it reached from there; `seen_above`: this is told further up."""

    kind: str
    name: str
    facts: dict[str, Any]
    reached: list["TraceNode"]
    seen_above: bool


class RecordTrace(Message):
    """`totals` counts what the record reached by kind; `live` are model versions that are served and learned from it."""

    record: str
    preview: str
    found: bool
    totals: dict[str, int]
    live: list[str]
    reached: list[TraceNode]


class RecordMatches(Message):
    """`records` counts the stored records in which the text stands, `size_bytes` what was searched."""

    match: str
    records: int
    size_bytes: int
    traces: list[RecordTrace]
