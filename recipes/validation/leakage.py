"""Records of a test split that stand in what a model was trained on: the same question, or nearly the same text.

The index holds the test split, which is small; what was trained on is read past it, so that memory stays flat.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from recipes.layouts import Layout, question
from recipes.parameters import NearDuplicates
from recipes.preparation.near_duplicates import Signer, band_keys, bands_of, shingles
from recipes.records import normalize
from recipes.validation.blocks import Block, blocks
from recipes.validation.findings import Leak

SHOWN = 200


class HeldOut:
    """The records of a test split, by what they ask and by the signatures of their texts."""

    def __init__(self, files: Sequence[Path], near: NearDuplicates) -> None:
        self._near = near
        self.texts: list[str] = []
        self._asked: dict[str, list[int]] = {}
        signer = Signer(near)
        for block in blocks(files):
            for place, text in enumerate(block.texts):
                self._asked.setdefault(asked(block, place), []).append(len(self.texts))
                self.texts.append(text)
                signer.add(text)
        self._signatures = signer.signatures()
        self._buckets = [Buckets(keys) for keys in self._keys(self._signatures)]

    def leaks(self, files: Sequence[Path], ancestor: str) -> Iterator[Leak]:
        """Each test record that stands in these files, once, where it first does; an equal question before a near text."""
        exact: dict[int, Leak] = {}
        near: dict[int, Leak] = {}
        for block in blocks(files):
            for place in range(len(block.rows)):
                for row in self._asked.get(asked(block, place), ()):
                    if row not in exact:
                        exact[row] = self._leak(row, "exact", 1.0, ancestor, block.start + place)
            for row, place, similarity in self._near_matches(block, exact.keys() | near.keys()):
                near[row] = self._leak(row, "near", similarity, ancestor, block.start + place)
        yield from (exact.get(row) or near[row] for row in sorted(exact.keys() | near.keys()))

    def _near_matches(self, block: Block, known: set[int]) -> Iterator[tuple[int, int, float]]:
        """(row of the test split, place in the block, similarity). Candidates share a band; Jaccard decides."""
        if not self.texts:
            return
        signer = Signer(self._near)
        for text in block.texts:
            signer.add(text)
        candidates: set[tuple[int, int]] = set()
        for keys, buckets in zip(self._keys(signer.signatures()), self._buckets, strict=True):
            for place in np.flatnonzero(np.isin(keys, buckets.keys)).tolist():
                candidates.update((row, place) for row in buckets.rows(keys[place]))
        found = set(known)
        for row, place in sorted(candidates, key=lambda pair: (pair[1], pair[0])):
            if row not in found and (similarity := jaccard(self.texts[row], block.texts[place])) >= self._near.threshold:
                found.add(row)
                yield row, place, similarity

    def _keys(self, signatures: NDArray[np.uint32]) -> Iterator[NDArray[np.uint64]]:
        bands, rows = bands_of(self._near)
        return (band_keys(signatures, band * rows, rows) for band in range(bands))

    def _leak(self, row: int, match: str, similarity: float, ancestor: str, line: int) -> Leak:
        return Leak(
            line=row + 1,
            text=self.texts[row][:SHOWN],
            match=match,
            similarity=round(similarity, 3),
            ancestor=ancestor,
            ancestor_line=line,
        )


class Buckets:
    """The rows of each key of a band."""

    def __init__(self, keys: NDArray[np.uint64]) -> None:
        self._order = np.argsort(keys, kind="stable")
        self.keys = keys[self._order]

    def rows(self, key: np.uint64) -> list[int]:
        begin, end = np.searchsorted(self.keys, key, side="left"), np.searchsorted(self.keys, key, side="right")
        rows: list[int] = self._order[begin:end].tolist()
        return rows


def asked(block: Block, place: int) -> str:
    """What a record asks, regardless of capitals and punctuation; of one without a layout, all that it says."""
    layout: Layout | None = block.layouts[place]
    return normalize(block.texts[place] if layout is None else question(block.rows[place], layout))


def jaccard(text: str, other: str) -> float:
    """Share of the runs of three words that two texts have in common."""
    one, two = set(shingles(text)), set(shingles(other))
    return len(one & two) / len(one | two)
