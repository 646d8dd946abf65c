"""Find test records in training data, exactly or nearly equal."""

import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from recipes.contracts.parameters import NearDuplicates
from recipes.contracts.validation_results import Leak
from recipes.preparation.deduplication import MinHashSigner, choose_bands, hash_band, make_shingles
from recipes.records.fingerprint import hash_record
from recipes.records.record_layouts import Layout, read_question
from recipes.records.record_reader import normalize_text
from recipes.validation.record_blocks import RecordBlock, iterate_blocks, iterate_lines, read_layout_and_text

# Random access to records in files: 20 bytes of memory per record, independent of its length.


class RecordOffsets:
    """Records of JSON lines files, numbered from 0 over all files; blank lines are skipped."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._paths = files
        self._files = ExitStack()
        self._open: list[int] = []
        self._starts, self._lengths, self._file_numbers = array("q"), array("q"), array("i")
        self._decode = msgspec.json.Decoder(dict[str, Any]).decode
        for number, path in enumerate(files):
            start = 0
            with path.open("rb") as lines:
                for line in lines:
                    if line.strip():
                        self._starts.append(start)
                        self._lengths.append(len(line))
                        self._file_numbers.append(number)
                    start += len(line)

    def __enter__(self) -> Self:
        self._open = [self._files.enter_context(path.open("rb")).fileno() for path in self._paths]
        return self

    def __exit__(self, *error: object) -> None:
        self._files.close()

    def __len__(self) -> int:
        return len(self._starts)

    def read(self, number: int) -> dict[str, Any]:
        return self._decode(os.pread(self._open[self._file_numbers[number]], self._lengths[number], self._starts[number]))


# Search training data for a test split's records: equal questions, or nearly equal texts.
#
# Memory holds fingerprints of the test split, about 200 bytes per record independent of its length; training data is
# streamed. If a fingerprint matches, the test record is read again and its text is compared.

MAX_TEXT_CHARACTERS = 200
HashKeys = NDArray[np.uint64]
RowNumbers = NDArray[np.uint32]


class HeldOutIndex:
    """Index of a test split by questions and by signatures of texts."""

    def __init__(self, files: Sequence[Path], near: NearDuplicates) -> None:
        self._near = near
        self._records = RecordOffsets(files)
        self._exit_stack = ExitStack()
        questions: list[HashKeys] = []
        bands: list[list[HashKeys]] = [[] for _ in range(choose_bands(near)[0])]
        for block in iterate_blocks(iterate_lines(files)):
            questions.append(hash_questions(block))
            for collected, keys in zip(bands, self._band_keys(block), strict=True):
                collected.append(keys)
        self._asked = KeyBuckets(questions)
        self._bands = [KeyBuckets(collected) for collected in bands]

    def __enter__(self) -> Self:
        self._exit_stack.enter_context(self._records)
        return self

    def __exit__(self, *error: object) -> None:
        self._exit_stack.close()

    def __len__(self) -> int:
        return len(self._records)

    def leaks(self, lines: Iterable[bytes], ancestor: str) -> Iterator[Leak]:
        """Yield the test records found in these lines, each once with its first match.

        Equal questions take precedence.
        """
        exact, near = np.zeros(len(self), np.int64), np.zeros(len(self), np.int64)
        similarity = np.ones(len(self))
        for block in iterate_blocks(lines):
            self._find_equal(block, exact)
            self._find_near(block, exact, near, similarity)
        for row in np.flatnonzero(exact | near).tolist():
            _, text = read_layout_and_text(self._records.read(row))
            yield Leak(
                line=row + 1,
                text=text[:MAX_TEXT_CHARACTERS],
                match="exact" if exact[row] else "near",
                similarity=1.0 if exact[row] else round(float(similarity[row]), 3),
                ancestor=ancestor,
                ancestor_line=int(exact[row] or near[row]),
            )

    def _find_equal(self, block: RecordBlock, exact: NDArray[np.int64]) -> None:
        """Record the line of equal questions in `exact`, in which 0 means none."""
        keys = hash_questions(block)
        for place in self._asked.find_present(keys):
            rows = self._asked.rows(keys[place])
            for row in rows[exact[rows] == 0].tolist():
                record = self._records.read(row)
                if normalized_question(record, *read_layout_and_text(record)) == normalized_question(
                    block.rows[place], block.layouts[place], block.texts[place]
                ):
                    exact[row] = block.start + place

    def _find_near(
        self, block: RecordBlock, exact: NDArray[np.int64], near: NDArray[np.int64], similarity: NDArray[np.float64]
    ) -> None:
        """Record the line of nearly equal texts.

        Candidates share a band; their Jaccard similarity decides.
        """
        bands = list(self._band_keys(block))
        met = [band.find_present(keys) for band, keys in zip(self._bands, bands, strict=True)]
        for place in np.unique(np.concatenate(met)).tolist():
            rows = np.unique(np.concatenate([band.rows(keys[place]) for band, keys in zip(self._bands, bands, strict=True)]))
            rows = rows[(exact[rows] == 0) & (near[rows] == 0)]
            runs = set(make_shingles(block.texts[place])) if len(rows) else set()
            for row in rows.tolist():
                _, text = read_layout_and_text(self._records.read(row))
                if (found := jaccard_similarity(set(make_shingles(text)), runs)) >= self._near.threshold:
                    near[row], similarity[row] = block.start + place, found

    def _band_keys(self, block: RecordBlock) -> Iterator[HashKeys]:
        bands, rows = choose_bands(self._near)
        signer = MinHashSigner(self._near)
        for text in block.texts:
            signer.add(text)
        signatures = signer.signatures()
        return (hash_band(signatures, band * rows, rows) for band in range(bands))


class KeyBuckets:
    """Rows by key."""

    def __init__(self, parts: Sequence[HashKeys]) -> None:
        keys = np.concatenate([np.zeros(0, np.uint64), *parts])
        order = np.argsort(keys, kind="stable")
        self._keys, self._order = keys[order], order.astype(np.uint32)

    def find_present(self, keys: HashKeys) -> NDArray[np.int64]:
        """Return the indices of keys that have rows."""
        places = np.searchsorted(self._keys, keys)
        found = places < len(self._keys)
        found[found] = self._keys[places[found]] == keys[found]
        return np.flatnonzero(found)

    def rows(self, key: np.uint64) -> RowNumbers:
        begin, end = np.searchsorted(self._keys, key, side="left"), np.searchsorted(self._keys, key, side="right")
        return self._order[begin:end]


def hash_questions(block: RecordBlock) -> HashKeys:
    """Return the hashes of records' questions."""
    texts = (normalized_question(*record) for record in zip(block.rows, block.layouts, block.texts, strict=True))
    return np.array([hash_record(text.encode()) for text in texts], np.uint64)


def normalized_question(row: dict[str, Any], layout: Layout | None, text: str) -> str:
    """Normalize a record's question for comparison; without a layout, its whole text."""
    return normalize_text(text if layout is None else read_question(row, layout))


def jaccard_similarity(one: set[str], two: set[str]) -> float:
    """Return the Jaccard similarity of two sets of word trigrams."""
    return len(one & two) / len(one | two)
