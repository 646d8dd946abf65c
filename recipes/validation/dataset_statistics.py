"""Statistics of a dataset version, collected over blocks of records."""

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from recipes.contracts.dataset_contract import Measures
from recipes.contracts.validation_results import Slice, Statistics, Vocabulary
from recipes.preparation.deduplication import MinHashSigner, find_exact_duplicates, find_near_duplicates
from recipes.preparation.personal_data import CARD_NUMBER_RANGE, find_suspected_kinds, mask_value
from recipes.records.disk_partitions import Scratch, build_rows
from recipes.records.fingerprint import encode_canonical_line
from recipes.validation.drift import ColumnCollector, SampledMoments
from recipes.validation.record_blocks import RecordBlock

# A sample of records for distributions, drawn by a hash of the line number, so that it is reproducible.


def draw_sample(start: int, count: int, share: float) -> NDArray[np.bool_]:
    """Return a mask of the lines in a deterministic sample of `share` of all.

    `start` is the index of the first of `count` lines; `share` is from 0 to 1. A line is chosen by the splitmix64 hash of
    its index.
    """
    if share >= 1:
        return np.ones(count, dtype=bool)
    value = np.arange(start, start + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    chosen: NDArray[np.bool_] = (value ^ (value >> np.uint64(31))) < np.uint64(share * 2**64)
    return chosen


LANGUAGE_CHARACTERS = 300
MIN_CONFIDENCE = 0.5


def count_languages(texts: Sequence[str]) -> dict[str, int]:
    """Count texts by ISO 639 code of their beginning; `unclear` below `MIN_CONFIDENCE`."""
    # Imported here: the model is read from disk, and not all datasets need it.
    from recipes.preparation.text_filters import detect_language, load_model

    model = load_model()
    found: Counter[str] = Counter()
    for text in texts:
        language, certainty = detect_language(model, text, LANGUAGE_CHARACTERS)
        found[language if certainty >= MIN_CONFIDENCE else "unclear"] += 1
    return dict(found.most_common())


# Compute the statistics of a version from blocks of records. Memory holds the sample, independent of the dataset's size.

MAX_EXAMPLES = 5
MAX_EXAMPLE_CHARACTERS = 2000
MAX_TOP_VALUES = 40
MAX_SLICES = 50
MAX_TIMESTAMP_MS = 253_402_300_800_000
"""Milliseconds from 1970 to the end of the year 9999; larger numbers are no timestamps."""
HASH_ROW = np.dtype([("hash", "<u8")])
WORD_PATTERN = r"[\p{L}\p{N}]+"


class StatisticsCollector:
    """Collects statistics over blocks; `records` is their total number, `scratch` a folder for temporary files."""

    def __init__(self, measures: Measures, records: int, scratch: Path) -> None:
        self._measures = measures
        self._share = min(1.0, measures.sample / max(records, 1))
        self._scratch = Scratch(Path(tempfile.mkdtemp(dir=scratch)))
        self._records = 0
        self._columns: dict[str, ColumnCollector] = {}
        self._layouts: Counter[str] = Counter()
        self._characters, self._words = SampledMoments(), SampledMoments()
        self._texts: list[str] = []
        self._hashes = self._scratch.partitions("hashes", HASH_ROW, 0)
        self._lengths: list[int] = []
        self._signatures: list[Path] = []
        self._personal: Counter[str] = Counter()
        self._newest: int | None = None
        self._slices: dict[tuple[str, str], list[Any]] = {}
        self._examples: list[str] = []

    def add(self, block: RecordBlock) -> None:
        chosen = draw_sample(block.start, len(block.rows), self._share)
        sampled = np.flatnonzero(chosen).tolist()
        texts = pl.Series(block.texts, dtype=pl.String)
        characters, words = texts.str.len_chars().to_numpy(), texts.str.count_matches(WORD_PATTERN).to_numpy()
        self._characters.add(characters, chosen)
        self._words.add(words, chosen)
        self._texts += [block.texts[row] for row in sampled]
        identities = record_identities(block)
        hashes = pl.Series(identities, dtype=pl.String).hash().to_numpy()
        self._hashes.add(np.zeros(len(hashes)), build_rows(HASH_ROW, hashes))
        self._lengths.append(len(hashes))
        self._layouts.update(layout or "none" for layout in block.layouts)
        self._add_columns(block, chosen)
        self._add_personal_data(block)
        self._add_signatures(identities)
        self._add_slices(block, characters)
        room = MAX_EXAMPLES - len(self._examples)
        self._examples += [line.decode()[:MAX_EXAMPLE_CHARACTERS].strip() for line in block.lines[:room]]
        self._records += len(block.rows)

    def statistics(self) -> Statistics:
        duplicates, near_duplicates = self._duplicates()
        return Statistics(
            records=self._records,
            sampled=len(self._texts),
            columns={name: seen.statistics(self._records) for name, seen in sorted(self._columns.items())},
            layouts=dict(self._layouts.most_common()),
            characters=self._characters.numbers(),
            words=self._words.numbers(),
            vocabulary=count_vocabulary(self._texts),
            languages=count_languages(self._texts) if self._measures.languages else {},
            duplicates=duplicates,
            near_duplicates=near_duplicates,
            personal_data=dict(self._personal.most_common()),
            newest=self._newest,
            slices=self._build_slices(),
            examples=tuple(self._examples),
        )

    def _add_columns(self, block: RecordBlock, chosen: NDArray[np.bool_]) -> None:
        for name in {name: None for row in block.rows for name in row}:
            self._columns.setdefault(name, ColumnCollector(name)).add(block, chosen)
        if self._measures.timestamp is not None:
            moments = [parse_timestamp_ms(row.get(self._measures.timestamp)) for row in block.rows]
            self._newest = max((moment for moment in [self._newest, *moments] if moment is not None), default=None)

    def _add_personal_data(self, block: RecordBlock) -> None:
        # Texts, and integers as long as a card number: in a whole JSON line, the prefilter's pattern would match across
        # several numbers.
        suspected = find_suspected_kinds(
            pa.array(["\n".join(iterate_searched_texts(row)) for row in block.rows], pa.large_string())
        )
        for row, kinds in zip(block.rows, suspected, strict=True):
            if kinds:
                mask_value(row, self._personal, kinds)

    def _add_signatures(self, identities: Sequence[str]) -> None:
        if self._measures.near_duplicates is None:
            return
        signer = MinHashSigner(self._measures.near_duplicates)
        for text in identities:
            signer.add(text)
        self._signatures.append(self._scratch.folder / f"{len(self._signatures)}.npy")
        np.save(self._signatures[-1], signer.signatures())

    def _duplicates(self) -> tuple[int, int | None]:
        """Return the numbers of records that equal, and that nearly equal, an earlier one.

        The latter is None if not requested.
        """
        scratch, total, near = self._scratch, self._records, self._measures.near_duplicates
        with scratch.column("equal", np.bool_, total, 0) as equal, scratch.column("near", np.bool_, total, 0) as close:
            with self._hashes:
                digests = (np.column_stack([rows["hash"], rows["hash"]]) for rows in self._hashes.pieces(0))
                for places in find_exact_duplicates(digests, total, scratch):
                    equal.assign(places, 1)
            if near is not None:
                kept = (~marks for marks in equal.runs(self._lengths))
                for places in find_near_duplicates(self._signatures, kept, total, near, scratch):
                    close.assign(places, 1)
            found, nearly = (sum(int(marks.sum()) for marks in each.runs(self._lengths)) for each in (equal, close))
        return found, None if near is None else nearly

    def _add_slices(self, block: RecordBlock, characters: NDArray[Any]) -> None:
        wanted = self._measures.slices
        for name in wanted.columns:
            for row, length in zip(block.rows, characters.tolist(), strict=True):
                if name not in row:
                    continue
                seen = self._slices.setdefault((name, str(row[name])), [0, 0, Counter()])
                seen[0] += 1
                seen[1] += length
                if wanted.label is not None:
                    seen[2][str(row.get(wanted.label))] += 1

    def _build_slices(self) -> tuple[Slice, ...]:
        made = [
            Slice(
                column=column,
                value=value,
                records=count,
                mean_characters=length / count,
                labels=dict(labels.most_common(MAX_TOP_VALUES)),
            )
            for (column, value), (count, length, labels) in self._slices.items()
        ]
        made.sort(key=lambda each: (-each.records, each.value))
        return tuple(
            each
            for column in self._measures.slices.columns
            for each in [each for each in made if each.column == column][:MAX_SLICES]
        )


def record_identities(block: RecordBlock) -> list[str]:
    """Return the texts by which records are compared.

    What a model reads, or the whole record without a layout. By their texts alone, all purely numeric records would be
    equal.
    """
    read = zip(block.rows, block.layouts, block.texts, strict=True)
    return [text if layout else encode_canonical_line(row).decode() for row, layout, text in read]


def iterate_searched_texts(value: Any) -> Iterator[str]:
    """Yield all parts of a value that may contain personal data, as text."""
    if isinstance(value, str):
        yield value
    elif type(value) is int and value in CARD_NUMBER_RANGE:
        yield str(value)
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from iterate_searched_texts(item)


def count_vocabulary(texts: list[str]) -> Vocabulary:
    words = pl.Series(texts, dtype=pl.String).str.to_lowercase().str.extract_all(WORD_PATTERN).explode(empty_as_null=False)
    counts = words.drop_nulls().value_counts(name="count").sort(["count", words.name], descending=[True, False])
    top = counts.head(MAX_TOP_VALUES)
    return Vocabulary(
        words=int(counts["count"].sum()),
        distinct=len(counts),
        once=int((counts["count"] == 1).sum()),
        top=dict(zip(top[words.name].to_list(), top["count"].to_list(), strict=True)),
    )


def parse_timestamp_ms(value: Any) -> int | None:
    """Parse ISO 8601 text or Unix seconds (or milliseconds, which are larger) to milliseconds.

    None for others.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return int(value if value > 1e11 else value * 1000) if abs(value) < MAX_TIMESTAMP_MS else None
    if not isinstance(value, str):
        return None
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        return None
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)
