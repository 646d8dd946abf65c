"""Blocks of records -> the statistics of a version. Memory holds the sample, of however many records."""

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
from recipes.preparation.deduplication import Signer, near_duplicates
from recipes.preparation.duplicates import duplicates
from recipes.preparation.personal_data import CARD_NUMBERS, mask, suspects
from recipes.records.disk_partitions import Scratch, rows_of
from recipes.records.fingerprint import canonical_line
from recipes.validation.column_statistics import ColumnDescription, Moments
from recipes.validation.language import languages
from recipes.validation.record_blocks import Block
from recipes.validation.sampling import drawn

EXAMPLES = 5
EXAMPLE_CHARACTERS = 2000
TOP = 40
SLICES = 50
LATEST = 253_402_300_800_000
"""Milliseconds from 1970 to the end of the year 9999: a larger number is no time."""
HASHED = np.dtype([("hash", "<u8")])
WORD = r"[\p{L}\p{N}]+"


class Description:
    """Collects the statistics of records. `records` is how many there will be; `scratch` is a folder for large things."""

    def __init__(self, measures: Measures, records: int, scratch: Path) -> None:
        self._measures = measures
        self._share = min(1.0, measures.sample / max(records, 1))
        self._scratch = Scratch(Path(tempfile.mkdtemp(dir=scratch)))
        self._records = 0
        self._columns: dict[str, ColumnDescription] = {}
        self._layouts: Counter[str] = Counter()
        self._characters, self._words = Moments(), Moments()
        self._texts: list[str] = []
        self._hashes = self._scratch.partitions("hashes", HASHED, 0)
        self._lengths: list[int] = []
        self._signatures: list[Path] = []
        self._personal: Counter[str] = Counter()
        self._newest: int | None = None
        self._slices: dict[tuple[str, str], list[Any]] = {}
        self._examples: list[str] = []

    def see(self, block: Block) -> None:
        chosen = drawn(block.start, len(block.rows), self._share)
        sampled = np.flatnonzero(chosen).tolist()
        texts = pl.Series(block.texts, dtype=pl.String)
        characters, words = texts.str.len_chars().to_numpy(), texts.str.count_matches(WORD).to_numpy()
        self._characters.see(characters, chosen)
        self._words.see(words, chosen)
        self._texts += [block.texts[row] for row in sampled]
        known_by = identities(block)
        hashes = pl.Series(known_by, dtype=pl.String).hash().to_numpy()
        self._hashes.add(np.zeros(len(hashes)), rows_of(HASHED, hashes))
        self._lengths.append(len(hashes))
        self._layouts.update(layout or "none" for layout in block.layouts)
        self._see_columns(block, chosen)
        self._see_personal_data(block)
        self._sign(known_by)
        self._see_slices(block, characters)
        room = EXAMPLES - len(self._examples)
        self._examples += [line.decode()[:EXAMPLE_CHARACTERS].strip() for line in block.lines[:room]]
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
            vocabulary=vocabulary(self._texts),
            languages=languages(self._texts) if self._measures.languages else {},
            duplicates=duplicates,
            near_duplicates=near_duplicates,
            personal_data=dict(self._personal.most_common()),
            newest=self._newest,
            slices=self._made_slices(),
            examples=tuple(self._examples),
        )

    def _see_columns(self, block: Block, chosen: NDArray[np.bool_]) -> None:
        for name in {name: None for row in block.rows for name in row}:
            self._columns.setdefault(name, ColumnDescription(name)).see(block, chosen)
        if self._measures.timestamp is not None:
            moments = [moment_of(row.get(self._measures.timestamp)) for row in block.rows]
            self._newest = max((moment for moment in [self._newest, *moments] if moment is not None), default=None)

    def _see_personal_data(self, block: Block) -> None:
        # Of texts, and of integers as long as a card number: to the pattern that looks first, those of all numbers in a line
        # of JSON are one.
        suspected = suspects(pa.array(["\n".join(looked_at(row)) for row in block.rows], pa.large_string()))
        for row, kinds in zip(block.rows, suspected, strict=True):
            if kinds:
                mask(row, self._personal, kinds)

    def _sign(self, known_by: Sequence[str]) -> None:
        if self._measures.near_duplicates is None:
            return
        signer = Signer(self._measures.near_duplicates)
        for text in known_by:
            signer.add(text)
        self._signatures.append(self._scratch.folder / f"{len(self._signatures)}.npy")
        np.save(self._signatures[-1], signer.signatures())

    def _duplicates(self) -> tuple[int, int | None]:
        """Records that are equal to an earlier one; and those that are nearly equal to one, if they were asked for."""
        scratch, total, near = self._scratch, self._records, self._measures.near_duplicates
        with scratch.column("equal", np.bool_, total, 0) as equal, scratch.column("near", np.bool_, total, 0) as close:
            with self._hashes:
                digests = (np.column_stack([rows["hash"], rows["hash"]]) for rows in self._hashes.pieces(0))
                for places in duplicates(digests, total, scratch):
                    equal.put(places, 1)
            if near is not None:
                kept = (~marks for marks in equal.runs(self._lengths))
                for places in near_duplicates(self._signatures, kept, total, near, scratch):
                    close.put(places, 1)
            found, nearly = (sum(int(marks.sum()) for marks in each.runs(self._lengths)) for each in (equal, close))
        return found, None if near is None else nearly

    def _see_slices(self, block: Block, characters: NDArray[Any]) -> None:
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

    def _made_slices(self) -> tuple[Slice, ...]:
        made = [
            Slice(
                column=column,
                value=value,
                records=count,
                mean_characters=length / count,
                labels=dict(labels.most_common(TOP)),
            )
            for (column, value), (count, length, labels) in self._slices.items()
        ]
        made.sort(key=lambda each: (-each.records, each.value))
        return tuple(
            each
            for column in self._measures.slices.columns
            for each in [each for each in made if each.column == column][:SLICES]
        )


def identities(block: Block) -> list[str]:
    """By what each record is equal to others: what a model reads of it; where that is not known, all of it.

    By their texts alone, all records of numbers were one.
    """
    read = zip(block.rows, block.layouts, block.texts, strict=True)
    return [text if layout else canonical_line(row).decode() for row, layout, text in read]


def looked_at(value: Any) -> Iterator[str]:
    """All in a value that may hold personal data, as texts."""
    if isinstance(value, str):
        yield value
    elif type(value) is int and value in CARD_NUMBERS:
        yield str(value)
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from looked_at(item)


def vocabulary(texts: list[str]) -> Vocabulary:
    words = pl.Series(texts, dtype=pl.String).str.to_lowercase().str.extract_all(WORD).explode(empty_as_null=False)
    counts = words.drop_nulls().value_counts(name="count").sort(["count", words.name], descending=[True, False])
    top = counts.head(TOP)
    return Vocabulary(
        words=int(counts["count"].sum()),
        distinct=len(counts),
        once=int((counts["count"] == 1).sum()),
        top=dict(zip(top[words.name].to_list(), top["count"].to_list(), strict=True)),
    )


def moment_of(value: Any) -> int | None:
    """Milliseconds since 1970 of an ISO 8601 text or of Unix seconds (or milliseconds, which are larger); None of others."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return int(value if value > 1e11 else value * 1000) if abs(value) < LATEST else None
    if not isinstance(value, str):
        return None
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        return None
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)
