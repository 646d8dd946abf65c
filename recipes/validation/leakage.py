"""Records of a test split that stand in what a model was trained on: the same question, or nearly the same text.

In memory are fingerprints of the test split, some 200 bytes a record however long the records are; what was trained on is
read past them. A test record whose fingerprint is met is read again, and its text decides.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from recipes.contracts.parameters import NearDuplicates
from recipes.contracts.validation_results import Leak
from recipes.preparation.deduplication import Signer, band_keys, bands_of, shingles
from recipes.records.fingerprint import record_hash
from recipes.records.layouts import Layout, question
from recipes.records.record_reader import normalize
from recipes.validation.places import Places
from recipes.validation.record_blocks import Block, blocks, lines_in, read_by_a_model

SHOWN = 200
Keys = NDArray[np.uint64]
Rows = NDArray[np.uint32]


class HeldOut:
    """The records of a test split, by what they ask and by the signatures of their texts."""

    def __init__(self, files: Sequence[Path], near: NearDuplicates) -> None:
        self._near = near
        self._places = Places(files)
        self._open = ExitStack()
        questions: list[Keys] = []
        bands: list[list[Keys]] = [[] for _ in range(bands_of(near)[0])]
        for block in blocks(lines_in(files)):
            questions.append(question_keys(block))
            for collected, keys in zip(bands, self._band_keys(block), strict=True):
                collected.append(keys)
        self._asked = Buckets(questions)
        self._bands = [Buckets(collected) for collected in bands]

    def __enter__(self) -> Self:
        self._open.enter_context(self._places)
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def __len__(self) -> int:
        return len(self._places)

    def leaks(self, lines: Iterable[bytes], ancestor: str) -> Iterator[Leak]:
        """Each test record that stands in these lines, once, where it first does; an equal question before a near text."""
        exact, near = np.zeros(len(self), np.int64), np.zeros(len(self), np.int64)
        similarity = np.ones(len(self))
        for block in blocks(lines):
            self._find_equal(block, exact)
            self._find_near(block, exact, near, similarity)
        for row in np.flatnonzero(exact | near).tolist():
            _, text = read_by_a_model(self._places.read(row))
            yield Leak(
                line=row + 1,
                text=text[:SHOWN],
                match="exact" if exact[row] else "near",
                similarity=1.0 if exact[row] else round(float(similarity[row]), 3),
                ancestor=ancestor,
                ancestor_line=int(exact[row] or near[row]),
            )

    def _find_equal(self, block: Block, exact: NDArray[np.int64]) -> None:
        """Note the line where the question of a test record stands; `exact` has 0 where none does yet."""
        keys = question_keys(block)
        for place in self._asked.met(keys):
            rows = self._asked.rows(keys[place])
            for row in rows[exact[rows] == 0].tolist():
                record = self._places.read(row)
                if asked(record, *read_by_a_model(record)) == asked(
                    block.rows[place], block.layouts[place], block.texts[place]
                ):
                    exact[row] = block.start + place

    def _find_near(
        self, block: Block, exact: NDArray[np.int64], near: NDArray[np.int64], similarity: NDArray[np.float64]
    ) -> None:
        """Note the line of a text that is nearly that of a test record. Candidates share a band; Jaccard decides."""
        bands = list(self._band_keys(block))
        met = [band.met(keys) for band, keys in zip(self._bands, bands, strict=True)]
        for place in np.unique(np.concatenate(met)).tolist():
            rows = np.unique(np.concatenate([band.rows(keys[place]) for band, keys in zip(self._bands, bands, strict=True)]))
            rows = rows[(exact[rows] == 0) & (near[rows] == 0)]
            runs = set(shingles(block.texts[place])) if len(rows) else set()
            for row in rows.tolist():
                _, text = read_by_a_model(self._places.read(row))
                if (found := jaccard(set(shingles(text)), runs)) >= self._near.threshold:
                    near[row], similarity[row] = block.start + place, found

    def _band_keys(self, block: Block) -> Iterator[Keys]:
        bands, rows = bands_of(self._near)
        signer = Signer(self._near)
        for text in block.texts:
            signer.add(text)
        signatures = signer.signatures()
        return (band_keys(signatures, band * rows, rows) for band in range(bands))


class Buckets:
    """The rows of each key."""

    def __init__(self, parts: Sequence[Keys]) -> None:
        keys = np.concatenate([np.zeros(0, np.uint64), *parts])
        order = np.argsort(keys, kind="stable")
        self._keys, self._order = keys[order], order.astype(np.uint32)

    def met(self, keys: Keys) -> NDArray[np.int64]:
        """Which of the keys have rows."""
        places = np.searchsorted(self._keys, keys)
        found = places < len(self._keys)
        found[found] = self._keys[places[found]] == keys[found]
        return np.flatnonzero(found)

    def rows(self, key: np.uint64) -> Rows:
        begin, end = np.searchsorted(self._keys, key, side="left"), np.searchsorted(self._keys, key, side="right")
        return self._order[begin:end]


def question_keys(block: Block) -> Keys:
    """Of each record, the hash of what it asks."""
    texts = (asked(*record) for record in zip(block.rows, block.layouts, block.texts, strict=True))
    return np.array([record_hash(text.encode()) for text in texts], np.uint64)


def asked(row: dict[str, Any], layout: Layout | None, text: str) -> str:
    """What a record asks, regardless of capitals and punctuation; of one without a layout, all that it says."""
    return normalize(text if layout is None else question(row, layout))


def jaccard(one: set[str], two: set[str]) -> float:
    """Share of the runs of three words that two texts have in common."""
    return len(one & two) / len(one | two)
