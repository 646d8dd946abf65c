"""Statistics of a column, collected block by block."""

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recipes.contracts.validation_results import ColumnStatistics, Numbers
from recipes.validation.record_blocks import RecordBlock, read_column, to_double

SIGNIFICANT_DIGITS = 6
"""Significant digits of a stored sample."""
MAX_CATEGORIES = 50
"""A column with at most so many different values in the sample, each twice on average, holds categories."""
MAX_CATEGORY_CHARACTERS = 100
"""Characters of a category's name."""


class SampledMoments:
    """Count, mean and bounds of all values, and the sampled ones."""

    def __init__(self) -> None:
        self._count, self._sum = 0, 0.0
        self._minimum, self._maximum = np.inf, -np.inf
        self._sample: list[NDArray[np.float64]] = []

    def add(self, values: NDArray[Any], chosen: NDArray[np.bool_]) -> None:
        if not len(values):
            return
        numbers = values.astype(np.float64)
        self._count += len(numbers)
        self._sum += float(numbers.sum())
        self._minimum, self._maximum = min(self._minimum, float(numbers.min())), max(self._maximum, float(numbers.max()))
        self._sample.append(numbers[chosen])

    def numbers(self) -> Numbers:
        if not self._count:
            return Numbers(count=0, mean=None, minimum=None, maximum=None)
        sample = np.sort(np.concatenate(self._sample))
        return Numbers(
            count=self._count,
            mean=self._sum / self._count,
            minimum=self._minimum,
            maximum=self._maximum,
            sample=tuple(float(f"{value:.{SIGNIFICANT_DIGITS}g}") for value in sample.tolist()),
        )


class ColumnCollector:
    """Collects what a column holds over blocks. Records before its first block do not have it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._kinds: Counter[str] = Counter()
        self._num_filled = 0
        self._numbers, self._lengths = SampledMoments(), SampledMoments()
        self._values: Counter[str] | None = Counter()

    def add(self, block: RecordBlock, chosen: NDArray[np.bool_]) -> None:
        values, kinds = read_column(block.rows, self._name)
        self._kinds.update(kinds)
        self._num_filled += sum(
            kind not in ("missing", "null") and (kind not in ("string", "array", "object") or len(value) > 0)
            for value, kind in zip(values, kinds, strict=True)
        )
        is_number = np.array([kind in ("integer", "number") for kind in kinds], dtype=bool)
        has_length = np.array([kind in ("string", "array") for kind in kinds], dtype=bool)
        numbers = np.array([to_double(values[row]) for row in np.flatnonzero(is_number)], dtype=np.float64)
        self._numbers.add(numbers, chosen[is_number])
        lengths = np.array([len(values[row]) for row in np.flatnonzero(has_length)], dtype=np.int64)
        self._lengths.add(lengths, chosen[has_length])
        if self._values is not None:
            named = [row for row in np.flatnonzero(chosen).tolist() if kinds[row] in ("string", "boolean", "integer")]
            self._values.update(str(values[row])[:MAX_CATEGORY_CHARACTERS] for row in named)
            if len(self._values) > MAX_CATEGORIES:
                self._values = None

    def statistics(self, records: int) -> ColumnStatistics:
        """Of `records` records, of which those in blocks that were not seen do not have the column."""
        unseen = records - self._kinds.total()
        kinds = Counter(self._kinds)
        kinds["missing"] += unseen
        values = self._values
        is_category = values is not None and 0 < len(values) <= values.total() / 2
        numbers, lengths = self._numbers.numbers(), self._lengths.numbers()
        return ColumnStatistics(
            kinds={kind: count for kind, count in sorted(kinds.items()) if count},
            filled=self._num_filled,
            numbers=numbers if numbers.count else None,
            lengths=lengths if lengths.count else None,
            categories=dict(values.most_common()) if is_category and values is not None else None,
        )
