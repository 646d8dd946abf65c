"""Filter distinct records by language, toxicity and length, and tokenize them."""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from recipes.contracts.parameters import AugmentParameters, PrepareParameters
from recipes.contracts.quantities import pluralize
from recipes.preparation import read_stage
from recipes.preparation.plan import Plan, Reject, atomic_path, open_table, write_table
from recipes.preparation.split_assignment import SPLITS, parse_split_name
from recipes.preparation.text_filters import LanguageFilter, ToxicityFilter
from recipes.preparation.tokenization.record_tokenizer import TOKEN_FIELDS, RecordTokenizer, Tokens, build_token_columns
from recipes.records.conversation import UnfitRecord
from recipes.records.record_layouts import Layout, read_record_text

STAGE = "encode"
DISTINCT_STAGE = "distinct"
TOKENIZER_FOLDER = "tokenizer"
BATCH_ROWS = 1024

RECORD_FIELDS = (
    ("record", pa.large_binary()),
    ("digest", pa.binary(16)),
    ("source", pa.uint64()),
    ("own", pa.uint64()),
    ("said", pa.uint64()),
    ("draw", pa.uint64()),  # of the question before masking and after (`recipes.preparation.read_stage`)
    ("masked", pa.uint64()),
    ("split", pa.int8()),  # index in `SPLITS` if the record names its split, else -1
    ("group", pa.string()),
    ("class", pa.string()),
)


SUMMARY_COLUMNS = ("draw", "masked", "split", "group", "class")


class EncodeFacts(msgspec.Struct):
    """Results for a range: bytes of its table, rejected records, and number of truncated ones."""

    size: int = 0
    rejects: list[Reject] = []
    truncated: int = 0


def encoded_schema(parameters: PrepareParameters) -> pa.Schema:
    return pa.schema([*RECORD_FIELDS, *(TOKEN_FIELDS if parameters.tokenize else ())])


def encode_range(plan: Plan, index: int) -> None:
    """Encode range `index`, unless that is done."""
    facts_file = plan.place(STAGE, index, "json")
    if facts_file.is_file():
        return
    encoder = cached_encoder(plan.work, plan.parameters.model_dump_json())
    facts = EncodeFacts()
    write_table(
        plan.place(STAGE, index, "arrow"),
        encoded_schema(plan.parameters),
        encoder.batches(read_distinct_records(plan, index), facts),
    )
    read_stage.write_summary(plan, STAGE, index, SUMMARY_COLUMNS)
    with atomic_path(facts_file) as part:
        facts.size = plan.place(STAGE, index, "arrow").stat().st_size
        part.write_bytes(msgspec.json.encode(facts))


def read_encode_facts(plan: Plan, index: int) -> EncodeFacts:
    return msgspec.json.decode(plan.place(STAGE, index, "json").read_bytes(), type=EncodeFacts)


def read_distinct_records(plan: Plan, index: int) -> Iterator[pa.RecordBatch]:
    """Yield the records of a range that equal no earlier one, in small batches."""
    gone = np.load(plan.place(DISTINCT_STAGE, index, "npy"))
    done = 0
    for batch in open_table(plan.place(read_stage.STAGE, index, "arrow")).to_batches(max_chunksize=BATCH_ROWS):
        yield batch.filter(pa.array(gone[done : done + len(batch)] == 0))
        done += len(batch)


@lru_cache(maxsize=1)
def cached_encoder(work: Path, parameters: str) -> "Encoder":
    """Return this process's encoder: loading its models often takes longer than encoding a range."""
    return Encoder(PrepareParameters.model_validate_json(parameters), work / TOKENIZER_FOLDER)


class Encoder:
    """Filters and tokenizer of a preparation."""

    def __init__(self, parameters: PrepareParameters, tokenizer: Path) -> None:
        self.parameters = parameters
        self.filter = parameters.filter
        self._text_filters = make_text_filters(parameters)
        self._tokenizer = RecordTokenizer(tokenizer, parameters.tokenize) if parameters.tokenize else None
        self._decode = msgspec.json.Decoder().decode

    def batches(self, source: Iterator[pa.RecordBatch], facts: EncodeFacts) -> Iterator[pa.RecordBatch]:
        """Yield batches of `encoded_schema`, and add rejected and truncated records to `facts`."""
        for batch in source:
            rows = [self._decode(raw) for raw in batch.column("record").to_pylist()]
            layouts = [read_stage.LAYOUTS[code] for code in batch.column("layout").to_pylist()]
            lines = batch.column("line").to_pylist()
            kept = []
            for place, (line, row, layout) in enumerate(zip(lines, rows, layouts, strict=True)):
                if reject := self._find_reject(line, row, layout):
                    facts.rejects.append(reject)
                else:
                    kept.append(place)
            tokens: list[Tokens] = []
            if self._tokenizer is not None:
                # covers all records: table rows are never tokenized
                known = [layout for place in kept if (layout := layouts[place])]
                encoded = self._tokenizer.tokenize([rows[place] for place in kept], known)
                fitting = []
                for place, result in zip(kept, encoded, strict=True):
                    ready = self._fit_length(lines[place], result)
                    if isinstance(ready, Reject):
                        facts.rejects.append(ready)
                    else:
                        facts.truncated += isinstance(result, Tokens) and len(ready) < len(result)
                        fitting.append(place)
                        tokens.append(ready)
                kept = fitting
            yield self._build_batch(batch, [rows[place] for place in kept], kept, tokens)

    def _find_reject(self, line: int, row: dict[str, Any], layout: Layout | None) -> Reject | None:
        if self._text_filters and layout:  # table rows have no text
            text = read_record_text(row, layout)
            for reason, problem in self._text_filters:
                if detail := problem(text):
                    return Reject(line, reason, detail)
        column = self.parameters.split.column
        if column and parse_split_name(row.get(column)) is None:
            return Reject(line, "split", f"'{column}' must be one of {', '.join(SPLITS)}")
        return None

    def _fit_length(self, line: int, result: Tokens | UnfitRecord) -> Tokens | Reject:
        """Return the record's tokens, truncated to `max_length`, or the reason to reject it."""
        assert self.parameters.tokenize is not None
        if isinstance(result, UnfitRecord):
            return Reject(line, "chat template", str(result))
        length, limit = len(result), self.parameters.tokenize.max_length
        if self.filter.min_length and length < self.filter.min_length:
            return Reject(line, "too short", f"{pluralize(length, 'token')}, min_length is {self.filter.min_length}")
        if self.filter.max_length and length > self.filter.max_length:
            return Reject(line, "too long", f"{pluralize(length, 'token')}, max_length is {self.filter.max_length}")
        if length > limit:
            result = result.cut(limit)
        if not result.teaches:
            return Reject(line, "no answer", f"its question alone fills max_length {limit}")
        return result

    def _build_batch(
        self, batch: pa.RecordBatch, rows: list[dict[str, Any]], kept: list[int], tokens: list[Tokens]
    ) -> pa.RecordBatch:
        split, augment = self.parameters.split, self.parameters.augment
        chosen = batch.take(pa.array(kept, pa.int64()))
        columns = [
            *(chosen.column(name) for name in ("record", "digest", "source", "own", "said", "draw", "masked")),
            pa.array([split_number(row, split.column) for row in rows], pa.int8()),
            pa.array([str(row.get(split.group_by, "")) if split.group_by else "" for row in rows], pa.string()),
            pa.array([read_class(row, augment) for row in rows], pa.string()),
        ]
        if self._tokenizer is not None:
            tokenize = self._tokenizer.parameters
            columns += build_token_columns(
                tokens, tokenize.max_length if tokenize.padding else None, self._tokenizer.padding
            )
        return pa.record_batch(columns, encoded_schema(self.parameters))


def read_class(row: Mapping[str, Any], augment: AugmentParameters) -> str:
    """Return the class for oversampling; empty if unknown or not needed."""
    known = row.get(augment.class_column) if augment.oversample_minority else None
    return "" if known is None else str(known)


def make_text_filters(parameters: PrepareParameters) -> list[tuple[str, Any]]:
    """Load the requested filters.

    Each is a reason and a function that returns a text's problem or None.
    """
    filters: list[tuple[str, Any]] = []
    if parameters.filter.languages:
        filters.append(
            ("language", LanguageFilter(parameters.filter.languages, parameters.filter.language_confidence).problem)
        )
    if parameters.filter.toxicity:
        filters.append(("toxicity", ToxicityFilter(parameters.filter.toxicity).problem))
    return filters


def split_number(row: dict[str, Any], column: str | None) -> int:
    name = parse_split_name(row.get(column)) if column else None
    return SPLITS.index(name) if name else -1
