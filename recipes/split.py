"""The program split: divide a dataset version into train, validation and test without leaks.

Deterministic. With `group_by`, each group is spread over the splits as evenly as its size allows. A split is no copy: it
selects lines of the version in their order (`recipes.storage.line_selection`). The dataset may exceed memory and disk: it is
streamed twice from the store.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from pydantic import JsonValue

from recipes.contracts.job import BadConfiguration, Job, Result
from recipes.contracts.parameters import SplitParameters
from recipes.contracts.quantities import pluralize
from recipes.contracts.rendering import Rendering
from recipes.preparation.source import Source
from recipes.preparation.split_assignment import (
    SPLITS,
    TRAIN,
    assign_splits,
    count_leaks,
    draw_rank,
    parse_split_name,
    refuse_empty_splits,
    refuse_missing_groups,
)
from recipes.records.disk_partitions import ColumnReader, Rows, Scratch, SpilledColumn
from recipes.records.key_index import hash_key
from recipes.records.record_layouts import LAYOUT_KEYS, OPTIONAL_KEYS, Layout, read_question, require_one_layout
from recipes.records.record_reader import normalize_text
from recipes.runner import log_line, main
from recipes.storage.artifact_store import Store
from recipes.storage.line_selection import LineMask, bitmap_uri, iterate_line_batches, origin_uri, pack_bitmap
from recipes.storage.manifest import Artifact, FileRecord, LineSelection, Manifest

READ_BYTES = 1 << 20
BATCH_ROWS = 1 << 16
"""Rows held as Python objects at a time."""
QUESTION_ROW = np.dtype([("draw", "<u8"), ("group", "<u8"), ("is_grouped", "?"), ("split", "i1")])
QuestionRow: TypeAlias = tuple[int, int, bool, int]
Files: TypeAlias = dict[str, list[FileRecord]]


@dataclass(frozen=True)
class SplitRows:
    """Index in `SPLITS` of each record's split, and the number of leaked held-out records."""

    splits: SpilledColumn
    leaked: int


def split_rows(rows: Iterable[Mapping[str, Any]], parameters: SplitParameters, scratch: Scratch) -> SplitRows:
    """Assign rows to splits in a single pass.

    Equal rows and parameters give equal splits everywhere.

    Raises:
        BadConfiguration: a split would be empty, or a record has no layout or no valid split name.
    """
    with scratch.partitions("asked", QUESTION_ROW, 0) as all_asked:
        total, is_grouped, counts = 0, False, np.zeros(len(SPLITS), np.int64)
        for asked in batch_rows(hash_questions(rows, parameters)):
            all_asked.add(np.zeros(len(asked)), asked)
            total += len(asked)
            is_grouped = is_grouped or bool(asked["is_grouped"].any())
            counts += np.bincount(asked["split"], minlength=len(SPLITS))
        if not parameters.column:
            refuse_missing_groups(is_grouped, parameters)
            drawn = ((asked["draw"], asked["group"]) for asked in all_asked.pieces(0))
            return SplitRows(assign_splits(drawn, total, parameters, scratch), 0)
        refuse_empty_splits(counts.tolist(), parameters.column)
        leaked = count_leaks(((asked["draw"], asked["split"]) for asked in all_asked.pieces(0)), total, scratch)
        splits, before = scratch.column("split", np.int8, total, TRAIN), 0
        for asked in all_asked.pieces(0):
            splits.assign(before + np.arange(len(asked), dtype=np.uint64), asked["split"])
            before += len(asked)
        return SplitRows(splits, leaked)


def hash_questions(rows: Iterable[Mapping[str, Any]], parameters: SplitParameters) -> Iterator[QuestionRow]:
    """Yield each row's values for `QUESTION_ROW`."""
    for line, (row, layout) in enumerate(require_one_layout(rows), start=1):
        place, group = TRAIN, None
        if parameters.column:
            if (name := parse_split_name(row.get(parameters.column))) is None:
                raise BadConfiguration(f"line {line}: '{parameters.column}' must be one of {', '.join(SPLITS)}")
            place = SPLITS.index(name)
        elif parameters.group_by:
            group = row.get(parameters.group_by, "")
        drawn = draw_rank(normalize_text(read_question(row, layout)), parameters.seed)
        # Records without a value form a group; if all records lack one, the column does not exist.
        yield drawn, hash_key(str(group)), group not in ("", None), place


def batch_rows(asked: Iterator[QuestionRow]) -> Iterator[Rows]:
    while batch := list(islice(asked, BATCH_ROWS)):
        yield np.array(batch, QUESTION_ROW)


def read_line_batches(source: Source, path: str) -> Iterator[list[bytes]]:
    """Yield a file's lines in batches."""
    with source.open(path) as opened:
        yield from iterate_line_batches(iter(lambda: opened.read(READ_BYTES), b""))


@dataclass
class SplitPart:
    """A split's selection of one file while it is read.

    Holds one bit per record in memory.
    """

    records: int = 0
    chosen: int = 0
    size: int = 0
    digest: Any = field(default_factory=hashlib.sha256)
    _bitmap: bytearray = field(default_factory=bytearray)
    _rest: LineMask = field(default_factory=lambda: np.zeros(0, np.bool_))

    def add(self, lines: Sequence[bytes], marks: LineMask) -> None:
        data = b"".join(compress(lines, marks))
        self.records += len(marks)
        self.chosen += int(marks.sum())
        self.size += len(data)
        self.digest.update(data)
        marks = np.concatenate([self._rest, marks])
        whole = len(marks) // 8 * 8
        self._bitmap += pack_bitmap(marks[:whole])
        self._rest = marks[whole:]

    def bitmap(self) -> bytes:
        return bytes(self._bitmap) + pack_bitmap(self._rest)


def build_parts(source: Source, path: str, chosen: ColumnReader) -> dict[str, SplitPart]:
    """Select each split's lines of a file; `chosen` continues with the splits of its records."""
    parts = {name: SplitPart() for name in SPLITS}
    for lines in read_line_batches(source, path):
        splits = chosen.take(len(lines))
        for place, part in enumerate(parts.values()):
            part.add(lines, splits == place)
    return parts


def store_selections(
    store: Store, version: Artifact, source: Source, chosen: ColumnReader, places: Mapping[str, str]
) -> Files:
    """Store the splits' bitmaps and return their files.

    One per source file with a record in the split.
    """
    found: Files = {name: [] for name in SPLITS}
    before = 0
    for number, path in enumerate(source.files):
        records = 0
        for name, part in build_parts(source, path, chosen).items():
            records = part.records
            if part.chosen:
                bitmap = part.bitmap()
                selection = LineSelection(
                    of=version.digest,
                    path=path,
                    before=before,
                    records=records,
                    chosen=part.chosen,
                    sha256=hashlib.sha256(bitmap).hexdigest(),
                )
                target = f"{name}-{number:05}.jsonl"
                store.put_bytes(bitmap_uri(places[name], target), bitmap)
                found[name].append(
                    FileRecord(path=target, sha256=part.digest.hexdigest(), size=part.size, selection=selection)
                )
        before += records
    return found


def leave_out_context(row: dict[str, Any]) -> dict[str, Any]:
    """Return a record without columns that a later release added to the question."""
    if not row.keys() >= {*LAYOUT_KEYS[Layout.INSTRUCTION]}:
        return row
    return {key: value for key, value in row.items() if key not in OPTIONAL_KEYS[Layout.INSTRUCTION]}


def split_dataset(job: Job, store: Store, work: Path) -> Result:
    """Split a version. Input: `dataset`. Outputs: `train`, `validation`, `test`."""
    parameters = SplitParameters.model_validate(job.parameters)
    version = job.inputs["dataset"]
    source = Source(store, version, Path(job.cache_dir))
    rows = (json.loads(line) for path in source.files for lines in read_line_batches(source, path) for line in lines)
    if job.rendering is Rendering.AS_STORED:
        rows = (leave_out_context(row) for row in rows)
    divided = split_rows(rows, parameters, Scratch(work / "scratch"))
    places = {name: job.outputs[name].rstrip("/") for name in SPLITS}
    with divided.splits:
        files = store_selections(store, version, source, divided.splits.reader(), places)
    artifacts, counts = {}, {}
    for name, found in files.items():
        counts[name] = sum(file.selection.chosen for file in found if file.selection is not None)
        facts: dict[str, JsonValue] = {
            "split": name,
            "num_records": counts[name],
            "parameters": parameters.model_dump(mode="json"),
        }
        store.put_bytes(origin_uri(places[name]), version.uri.encode())
        manifest = Manifest(kind="split", files=tuple(found), inputs={"dataset": version.digest}, facts=facts)
        artifacts[name] = store.put_manifest(places[name], manifest)
        log_line(f"{name}: {pluralize(counts[name], 'record')}")
    return Result(
        work_digest=job.work_digest,
        artifacts=artifacts,
        metrics={name: float(count) for name, count in counts.items()},
        facts={"leaked": divided.leaked},
    )


if __name__ == "__main__":
    main(split_dataset)
