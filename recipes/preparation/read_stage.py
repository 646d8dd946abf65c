"""Read lines: clean, mask and normalize records, and compute their digests."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recipes.contracts.parameters import CleanParameters, PrepareParameters
from recipes.preparation.deduplication import MinHashSigner
from recipes.preparation.personal_data import PersonalDataKinds, find_suspected_kinds, mask_value
from recipes.preparation.plan import Plan, Range, Reject, atomic_path, open_table, write_table
from recipes.preparation.source import ChunkedFile, LocalFile
from recipes.preparation.split_assignment import draw_rank
from recipes.records.conversation import (
    Conversation,
    UnfitRecord,
    normalize_conversation,
    parse_arguments,
    read_optional_text,
)
from recipes.records.features import UncleanRecord, check_features, clean_record
from recipes.records.fingerprint import (
    encode_canonical_line,
    encode_in_order,
    encode_stored_line,
    fingerprint_records,
    hash_record,
    to_canonical_line,
)
from recipes.records.record_layouts import (
    LAYOUT_KEYS,
    OPTIONAL_KEYS,
    Layout,
    UnknownLayout,
    detect_layout,
    find_unread,
    read_question,
    read_record_text,
)
from recipes.records.record_reader import normalize_text

# A record's draw decides its split: a number derived from its question before masking.
#
# The masked question's number would differ from the one in the version that this one is prepared from, so that held-out
# records of that version would be trained on here. Questions that masking made equal are joined by
# `recipes.preparation.split_stage`.

NON_WORD = r"[^A-Za-z0-9_]+"


def draw_ranks(questions: list[str], seed: int) -> list[int]:
    """Return a draw for each question, independent of case and punctuation.

    Equals `recipes.preparation.split_assignment.draw_rank`: what a version holds out, versions prepared from it hold out
    too.
    """
    words = pc.replace_substring_regex(pc.ascii_lower(pa.array(questions, pa.large_string())), NON_WORD, " ").to_pylist()
    # Libraries disagree about case and word characters outside ASCII.
    normal = (
        word.strip() if asked.isascii() else normalize_text(asked) for asked, word in zip(questions, words, strict=True)
    )
    return [draw_rank(text, seed) for text in normal]


# First stage: lines to clean records that fit a layout, without personal data, and digests for finding duplicates.

STAGE = "read"
BATCH_LINES, BATCH_BYTES = 2048, 1 << 20
"""Maximum lines, and approximate bytes, per batch."""
LAYOUTS: tuple[Layout | None, ...] = (*Layout, None)
"""None is a row of a table: features are computed from it, but no model learns from it."""
LAYOUT_CODES = {layout: code for code, layout in enumerate(LAYOUTS)}

READ_SCHEMA = pa.schema(
    [
        ("line", pa.int32()),  # within the range, from 1
        ("layout", pa.int8()),  # index in `LAYOUTS`
        ("record", pa.large_binary()),  # its stored line
        ("digest", pa.binary(16)),  # equal for records that teach a model the same
        ("source", pa.uint64()),  # hash of the record before cleaning and masking (`recipes.records.fingerprint`)
        ("own", pa.uint64()),  # its two hashes after cleaning and masking
        ("said", pa.uint64()),
        ("draw", pa.uint64()),  # of its question before masking and after
        ("masked", pa.uint64()),
    ]
)


SUMMARY_SUFFIX = "told.arrow"
"""Suffix of the table with the columns that are needed from all records together."""
SUMMARY_COLUMNS = ("line", "digest")


class ReadFacts(msgspec.Struct):
    """Results for a range.

    Attributes:
        lines: number of lines.
        masked: number of masked items by kind.
        rejects: rejected lines.
        retyped: columns in which masking turned a number into text.
        filled: number of records in which a column was filled.
        unread: number of records with a key that no model reads.
    """

    lines: int
    masked: dict[str, int]
    rejects: list[Reject]
    retyped: list[str] = []
    filled: dict[str, int] = {}
    unread: dict[str, int] = {}


def is_read(plan: Plan, index: int) -> bool:
    """Return whether a unit is done."""
    return plan.place(STAGE, index, "json").is_file()


def read_range(plan: Plan, index: int, file: LocalFile | ChunkedFile) -> None:
    """Read range `index` from `file`."""
    reader = RangeReader(plan)
    write_table(
        plan.place(STAGE, index, "arrow"), READ_SCHEMA, map(reader.batch, read_line_batches(file, plan.ranges[index]))
    )
    write_summary(plan, STAGE, index, SUMMARY_COLUMNS)
    if reader.signer is not None:
        with atomic_path(plan.place(STAGE, index, "npy")) as part, part.open("wb") as out:
            np.save(out, reader.signer.signatures())
    facts = ReadFacts(
        lines=reader.line,
        masked=dict(reader.masked),
        rejects=reader.rejects,
        retyped=sorted(reader.retyped),
        filled=dict(reader.filled),
        unread=dict(reader.unread),
    )
    with atomic_path(plan.place(STAGE, index, "json")) as part:
        part.write_bytes(msgspec.json.encode(facts))


def write_summary(plan: Plan, stage: str, index: int, columns: Sequence[str]) -> None:
    """Write some columns of a stage's table to a separate file.

    Pods exchange these instead of records.
    """
    asked = open_table(plan.place(stage, index, "arrow")).select(list(columns))
    write_table(plan.place(stage, index, SUMMARY_SUFFIX), asked.schema, asked.to_batches())


def read_summary(plan: Plan, stage: str, index: int) -> pa.Table:
    return open_table(plan.place(stage, index, SUMMARY_SUFFIX))


def read_facts(plan: Plan, index: int) -> ReadFacts:
    return msgspec.json.decode(plan.place(STAGE, index, "json").read_bytes(), type=ReadFacts)


def read_line_batches(file: LocalFile | ChunkedFile, place: Range) -> Iterator[list[bytes]]:
    """Yield the lines of a range in batches."""
    before = min(place.start, 1)  # the previous byte shows whether a line starts at the range's start
    with file.open(place.start - before, place.end) as stream:
        left = place.end - place.start + before
        if before:
            left -= len(stream.readline(left))
        while left > 0:
            lines: list[bytes] = []
            room = BATCH_BYTES
            while left > 0 and room > 0 and len(lines) < BATCH_LINES:
                lines.append(stream.readline())
                left -= len(lines[-1])
                room -= len(lines[-1])
            yield lines


class RangeReader:
    """Reads the lines of a range in batches."""

    def __init__(self, plan: Plan) -> None:
        near = plan.parameters.filter.near_dedup
        self.signer = MinHashSigner(near) if near else None
        self.masking = plan.parameters.augment.mask_pii
        self.cleaning = clean_parameters(plan.parameters)
        self.features = plan.parameters.features
        self.takes_tables = self.features is not None and plan.parameters.tokenize is None
        self.seed = plan.parameters.split.seed
        self.line = 0
        self.masked: Counter[str] = Counter()
        self.rejects: list[Reject] = []
        self.retyped: set[str] = set()
        self.filled: Counter[str] = Counter()
        self.unread: Counter[str] = Counter()
        self._decode = msgspec.json.Decoder().decode

    def batch(self, lines: list[bytes]) -> pa.RecordBatch:
        suspected: list[PersonalDataKinds] = (
            find_suspected_kinds(pa.array(lines, pa.large_binary())) if self.masking else [()] * len(lines)
        )
        numbers, layouts, records, digests, sources = [], [], [], [], []
        rows: list[dict[str, Any]] = []
        asked: list[str] = []
        asked_now: dict[int, str] = {}  # questions that masking changed
        for raw, kinds in zip(lines, suspected, strict=True):
            self.line += 1
            line = raw.strip()
            if not line:
                continue
            try:
                row = self._decode(line)
                if not isinstance(row, dict):
                    raise UnfitRecord("not a JSON object")
                line = encode_stored_line(row)
                source = hash_record(to_canonical_line(row, line))
                if self.cleaning is not None:
                    row = clean_record(row, self.cleaning, self.filled)
                    line = encode_stored_line(row)
                layout = self._layout(row)
                read = read_question(row, layout) if layout else line.decode()
                if self.features is not None:
                    check_features(self.features, row)
                if kinds:
                    found, before = self.masked.total(), row
                    row = mask_value(row, self.masked, kinds)
                    if self.masked.total() > found:
                        line = encode_stored_line(row)
                        self.retyped.update(
                            column for column, value in row.items() if type(value) is not type(before[column])
                        )
                        self._refuse_masked(before, row)
                # Inside the try block: a text of tools that is no longer JSON after masking is rejected.
                known_by = digest_record(row, layout) if layout else digest_table_row(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                self.rejects.append(Reject(self.line, "not JSON", str(error)))
                continue
            except UncleanRecord as error:
                self.rejects.append(Reject(self.line, error.reason, str(error)))
                continue
            except UnfitRecord as error:
                self.rejects.append(Reject(self.line, "no layout", str(error)))
                continue
            if self.signer is not None:
                self.signer.add(read_record_text(row, layout) if layout else line.decode())
            if (now := read_question(row, layout) if layout else line.decode()) != read:
                asked_now[len(rows)] = now
            asked.append(read)
            numbers.append(self.line)
            layouts.append(LAYOUT_CODES[layout])
            rows.append(row)
            records.append(line)
            digests.append(known_by)
            sources.append(source)
            self.unread.update(find_unread(row, layout))
        said_hashes, own = fingerprint_records(rows, records)
        drawn = draw_ranks(asked, self.seed)
        drawn_now = [*drawn]
        for place, number in zip(asked_now, draw_ranks(list(asked_now.values()), self.seed), strict=True):
            drawn_now[place] = number
        columns = [numbers, layouts, records, digests, sources, own, said_hashes, drawn, drawn_now]
        return pa.record_batch(
            [pa.array(column, field.type) for column, field in zip(columns, READ_SCHEMA, strict=True)], READ_SCHEMA
        )

    def _layout(self, row: dict[str, Any]) -> Layout | None:
        try:
            return detect_layout(row)
        except UnknownLayout:
            if self.takes_tables:
                return None
            raise

    def _refuse_masked(self, before: dict[str, Any], row: dict[str, Any]) -> None:
        """Raise UncleanRecord if a feature column is personal data: masking would merge all its values."""
        for _, column in self.features.named_columns if self.features is not None else ():
            if row.get(column) != before.get(column):
                raise UncleanRecord(
                    "masked feature", f"'{column}' is personal data: set augment.mask_pii to false, or use another column"
                )


def clean_parameters(parameters: PrepareParameters) -> CleanParameters | None:
    """Return the cleaning rules, with fill values masked if records are."""
    clean = parameters.clean
    return mask_fill_values(clean) if clean is not None and parameters.augment.mask_pii else clean


def mask_fill_values(clean: CleanParameters) -> CleanParameters:
    """Mask the fill values, because lines without suspected personal data are not masked after filling."""
    (kinds,) = find_suspected_kinds(pa.array([encode_canonical_line(clean.fill)], pa.large_binary()))
    return clean.model_copy(update={"fill": mask_value(clean.fill, Counter(), kinds)}) if kinds else clean


def digest_record(row: dict[str, Any], layout: Layout) -> bytes:
    """Return a 16-byte digest that is equal for records that teach the same.

    Other keys are ignored.

    Missing parts are left out: digests decide an order, which must stay as it was before tools were supported.
    """
    if layout is Layout.MESSAGES:
        content = b"\0".join(digested_parts(normalize_conversation(row)))
    else:
        optional = {key: text for key in OPTIONAL_KEYS.get(layout, ()) if (text := read_optional_text(row, key)) is not None}
        texts = [
            *(row[key] for key in LAYOUT_KEYS[layout]),
            *([json.dumps(optional, ensure_ascii=False)] if optional else ()),
        ]
        content = "\0".join(texts).encode()
    return hashlib.blake2b(content, digest_size=16, person=layout.name.encode()).digest()


def digested_parts(found: Conversation) -> Iterator[bytes]:
    """Yield everything that affects what is learned from a conversation.

    This includes the author's order of keys.
    """
    calls = [call for message in found.messages for call in message.get("tool_calls", ())]
    arguments = [parse_arguments(call["function"]["arguments"]) for call in calls]
    messages = [
        {**message, "tool_calls": [call["function"]["name"] for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in found.messages
    ]
    yield json.dumps(messages, sort_keys=True, ensure_ascii=False).encode()
    if found.tools or arguments:
        yield encode_in_order([found.tools, arguments, [call.get("id") for call in calls]])
    if not all(found.learned):
        yield bytes(found.learned)


def digest_table_row(line: bytes) -> bytes:
    """Like `digest_record`, for a table row that no model learns from: its whole line counts."""
    return hashlib.blake2b(line, digest_size=16, person=b"TABLE").digest()
