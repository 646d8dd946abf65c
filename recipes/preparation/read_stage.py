"""First stage: lines -> clean records that fit a layout, without personal data, and what tells equal ones."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from recipes.contracts.parameters import CleanParameters, PrepareParameters
from recipes.preparation.deduplication import Signer
from recipes.preparation.draws import draws
from recipes.preparation.personal_data import Kinds, mask, suspects
from recipes.preparation.plan import Plan, Range, written
from recipes.preparation.rejected_records import Reject
from recipes.preparation.source import ChunkedFile, LocalFile
from recipes.preparation.tables import open_table, write_table
from recipes.records.cleaning import Unclean, cleaned
from recipes.records.features import check
from recipes.records.fingerprint import canonical_line, fingerprints, record_hash
from recipes.records.layouts import KEYS, Layout, NoLayout, Unfit, layout_of, question, said, tools_of

STAGE = "read"
BATCH, BATCH_BYTES = 2048, 1 << 20
"""Lines that are looked at together: so many, or so many bytes of them."""
LAYOUTS: tuple[Layout | None, ...] = (*Layout, None)
"""None is a row of a table, from which features are computed and no model learns."""
CODES = {layout: code for code, layout in enumerate(LAYOUTS)}

SCHEMA = pa.schema(
    [
        ("line", pa.int32()),  # within the range, from 1
        ("layout", pa.int8()),  # place in `LAYOUTS`
        ("record", pa.large_binary()),  # canonical JSON
        ("digest", pa.binary(16)),  # equal for records from which a model learns the same
        ("source", pa.uint64()),  # hash of the record as it was read (`recipes.records.fingerprint`)
        ("own", pa.uint64()),  # its own two, as it goes on
        ("said", pa.uint64()),
        ("draw", pa.uint64()),  # of its question as it was read, and as it goes on
        ("masked", pa.uint64()),
    ]
)


TOLD = "told.arrow"
"""Suffix of a table beside a stage's records: the columns that are asked for all of them together."""
ASKED = ("line", "digest")


class ReadFacts(msgspec.Struct):
    """What is said of a range: its lines, what was masked by kind, the lines that were rejected, the columns in which a
    number is a text since it was masked, and in how many records a column was filled.
    """

    lines: int
    masked: dict[str, int]
    rejects: list[Reject]
    retyped: list[str] = []
    filled: dict[str, int] = {}


def is_read(plan: Plan, index: int) -> bool:
    """Whether a unit was done before: it is not done again."""
    return plan.place(STAGE, index, "json").is_file()


def read(plan: Plan, index: int, file: LocalFile | ChunkedFile) -> None:
    """Read range `index`, which is of `file`."""
    reader = Reader(plan)
    write_table(plan.place(STAGE, index, "arrow"), SCHEMA, map(reader.batch, lines_of(file, plan.ranges[index])))
    tell(plan, STAGE, index, ASKED)
    if reader.signer is not None:
        with written(plan.place(STAGE, index, "npy")) as part, part.open("wb") as out:
            np.save(out, reader.signer.signatures())
    facts = ReadFacts(
        lines=reader.line,
        masked=dict(reader.masked),
        rejects=reader.rejects,
        retyped=sorted(reader.retyped),
        filled=dict(reader.filled),
    )
    with written(plan.place(STAGE, index, "json")) as part:
        part.write_bytes(msgspec.json.encode(facts))


def tell(plan: Plan, stage: str, index: int, columns: Sequence[str]) -> None:
    """Leave some columns of a stage's table by themselves: pods give each other these, and not the records."""
    asked = open_table(plan.place(stage, index, "arrow")).select(list(columns))
    write_table(plan.place(stage, index, TOLD), asked.schema, asked.to_batches())


def told(plan: Plan, stage: str, index: int) -> pa.Table:
    return open_table(plan.place(stage, index, TOLD))


def read_facts(plan: Plan, index: int) -> ReadFacts:
    return msgspec.json.decode(plan.place(STAGE, index, "json").read_bytes(), type=ReadFacts)


def lines_of(file: LocalFile | ChunkedFile, place: Range) -> Iterator[list[bytes]]:
    """The lines of a range, some at a time."""
    before = min(place.start, 1)  # the byte that tells whether a line begins where the range does
    with file.open(place.start - before, place.end) as stream:
        left = place.end - place.start + before
        if before:
            left -= len(stream.readline(left))
        while left > 0:
            lines: list[bytes] = []
            room = BATCH_BYTES
            while left > 0 and room > 0 and len(lines) < BATCH:
                lines.append(stream.readline())
                left -= len(lines[-1])
                room -= len(lines[-1])
            yield lines


class Reader:
    """Reads the lines of one range in batches."""

    def __init__(self, plan: Plan) -> None:
        near = plan.parameters.filter.near_dedup
        self.signer = Signer(near) if near else None
        self.masking = plan.parameters.augment.mask_pii
        self.cleaning = cleaning_of(plan.parameters)
        self.features = plan.parameters.features
        self.takes_tables = self.features is not None and plan.parameters.tokenize is None
        self.seed = plan.parameters.split.seed
        self.line = 0
        self.masked: Counter[str] = Counter()
        self.rejects: list[Reject] = []
        self.retyped: set[str] = set()
        self.filled: Counter[str] = Counter()
        self._decode = msgspec.json.Decoder().decode

    def batch(self, lines: list[bytes]) -> pa.RecordBatch:
        suspected: list[Kinds] = suspects(pa.array(lines, pa.large_binary())) if self.masking else [()] * len(lines)
        numbers, layouts, records, digests, sources = [], [], [], [], []
        rows: list[dict[str, Any]] = []
        asked: list[str] = []
        asked_now: dict[int, str] = {}  # where it is something else since it was masked
        for raw, kinds in zip(lines, suspected, strict=True):
            self.line += 1
            line = raw.strip()
            if not line:
                continue
            try:
                row = self._decode(line)
                if not isinstance(row, dict):
                    raise Unfit("not a JSON object")
                line = canonical_line(row)
                source = record_hash(line)
                if self.cleaning is not None:
                    row = cleaned(row, self.cleaning, self.filled)
                    line = canonical_line(row)
                layout = self._layout(row)
                read = question(row, layout) if layout else line.decode()
                if self.features is not None:
                    check(self.features, row)
                if kinds:
                    found, before = self.masked.total(), row
                    row = mask(row, self.masked, kinds)
                    if self.masked.total() > found:
                        line = canonical_line(row)
                        self.retyped.update(
                            column for column, value in row.items() if type(value) is not type(before[column])
                        )
                        self._refuse_masked(before, row)
                # Here, where a text of tools that is no JSON since it was masked is rejected.
                known_by = digest(row, layout) if layout else digest_of_row(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                self.rejects.append(Reject(self.line, "not JSON", str(error)))
                continue
            except Unclean as error:
                self.rejects.append(Reject(self.line, error.reason, str(error)))
                continue
            except Unfit as error:
                self.rejects.append(Reject(self.line, "no layout", str(error)))
                continue
            if self.signer is not None:
                self.signer.add(said(row, layout) if layout else line.decode())
            if (now := question(row, layout) if layout else line.decode()) != read:
                asked_now[len(rows)] = now
            asked.append(read)
            numbers.append(self.line)
            layouts.append(CODES[layout])
            rows.append(row)
            records.append(line)
            digests.append(known_by)
            sources.append(source)
        said_hashes, own = fingerprints(rows, records)
        drawn = draws(asked, self.seed)
        drawn_now = [*drawn]
        for place, number in zip(asked_now, draws(list(asked_now.values()), self.seed), strict=True):
            drawn_now[place] = number
        columns = [numbers, layouts, records, digests, sources, own, said_hashes, drawn, drawn_now]
        return pa.record_batch([pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)], SCHEMA)

    def _layout(self, row: dict[str, Any]) -> Layout | None:
        try:
            return layout_of(row)
        except NoLayout:
            if self.takes_tables:
                return None
            raise

    def _refuse_masked(self, before: dict[str, Any], row: dict[str, Any]) -> None:
        """Raises Unclean where a column of the features is personal data: all such customers would be one."""
        for _, column in self.features.named if self.features is not None else ():
            if row.get(column) != before.get(column):
                raise Unclean(
                    "masked feature", f"'{column}' is personal data: set augment.mask_pii to false, or name another column"
                )


def cleaning_of(parameters: PrepareParameters) -> CleanParameters | None:
    """How records are cleaned, with the values that they are filled with as these go on."""
    clean = parameters.clean
    return masked_fill(clean) if clean is not None and parameters.augment.mask_pii else clean


def masked_fill(clean: CleanParameters) -> CleanParameters:
    """What records are filled with, masked as they are: only lines in which something was suspected are looked at again."""
    (kinds,) = suspects(pa.array([canonical_line(clean.fill)], pa.large_binary()))
    return clean.model_copy(update={"fill": mask(clean.fill, Counter(), kinds)}) if kinds else clean


def digest(row: dict[str, Any], layout: Layout) -> bytes:
    """16 bytes that are the same for records from which a model learns the same, whatever else stands in them."""
    if layout is Layout.MESSAGES:
        content = json.dumps(row["messages"], sort_keys=True, ensure_ascii=False).encode()
        if tools := tools_of(row):  # left out where there are none: a digest stays what it was before there were tools
            content += b"\0" + json.dumps(tools, sort_keys=True, ensure_ascii=False).encode()
    else:
        content = "\0".join([row[key] for key in KEYS[layout]]).encode()
    return hashlib.blake2b(content, digest_size=16, person=layout.name.encode()).digest()


def digest_of_row(line: bytes) -> bytes:
    """`digest` of a row of a table, from which no model learns: the same where all of it is."""
    return hashlib.blake2b(line, digest_size=16, person=b"TABLE").digest()
