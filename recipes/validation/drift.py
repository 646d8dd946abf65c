"""Collect column statistics, and test for drift: PSI, Kolmogorov-Smirnov and chi-squared."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recipes.contracts.validation_results import ColumnStatistics, Drift, FeatureDrift, Numbers, Statistics
from recipes.validation.record_blocks import RecordBlock, read_column, to_double

SIGNIFICANT_DIGITS = 6
"""Significant digits of stored samples."""
MAX_CATEGORIES = 50
"""A sampled column with at most this many distinct values, each twice on average, is categorical."""
MAX_CATEGORY_CHARACTERS = 100
"""Maximum characters of a category's name."""


class SampledMoments:
    """Count, mean and bounds of all values, and the sampled values."""

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
    """Collects a column's values over blocks; records before its first block lack the column."""

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
        """Return the column's statistics over `records` records.

        Those in blocks without the column count as missing.
        """
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


QUANTILE_BINS = 10
MIN_SHARE = 1e-4
"""Replaces the share of an empty bin, whose logarithm is undefined."""
MIN_SAMPLE_VALUES = 20
"""Minimum size of both samples: with fewer values, random variation looks like drift."""


def compare_versions(name: str, reference: Statistics, current: Statistics) -> Drift:
    """Measure the drift of `current` against `reference`, which is the version `name`."""
    before, now = column_types(reference), column_types(current)
    return Drift(
        reference=name,
        added={column: now[column] for column in sorted(now.keys() - before.keys())},
        removed={column: before[column] for column in sorted(before.keys() - now.keys())},
        retyped={
            column: (before[column], now[column])
            for column in sorted(before.keys() & now.keys())
            if before[column] != now[column]
        },
        features=tuple(sorted(compare_features(reference, current), key=lambda feature: -feature.psi)),
    )


def column_types(statistics: Statistics) -> dict[str, str]:
    """Return the types of columns except null; `?` marks optional columns."""
    return {name: column_type(column) for name, column in statistics.columns.items()}


def column_type(column: ColumnStatistics) -> str:
    named = [kind for kind in column.kinds if kind not in ("missing", "null")]
    return "|".join(named or ["null"]) + ("?" if "missing" in column.kinds or "null" in column.kinds else "")


def compare_features(reference: Statistics, current: Statistics) -> Iterator[FeatureDrift]:
    yield from numeric_drift("characters of a record", reference.characters, current.characters)
    yield from numeric_drift("words of a record", reference.words, current.words)
    yield from categorical_drift("language", reference.languages, current.languages)
    for name in sorted(reference.columns.keys() & current.columns.keys()):
        before, now = reference.columns[name], current.columns[name]
        if before.categories is not None and now.categories is not None:
            yield from categorical_drift(name, before.categories, now.categories)
        else:
            yield from numeric_drift(name, before.numbers, now.numbers)
            yield from numeric_drift(f"length of {name}", before.lengths, now.lengths)


def numeric_drift(feature: str, before: Numbers | None, now: Numbers | None) -> Iterator[FeatureDrift]:
    """Yield PSI over the reference's deciles, and the two-sample Kolmogorov-Smirnov test."""
    if before is None or now is None or min(len(before.sample), len(now.sample)) < MIN_SAMPLE_VALUES:
        return
    from scipy.stats import ks_2samp  # takes a second to import, and a first version has no reference

    # A value equal to an edge is in the bin below it, and values below the whole reference have their own bin: otherwise a
    # constant would share a bin with all larger, or smaller, values.
    deciles = np.quantile(before.sample, np.linspace(0, 1, QUANTILE_BINS + 1)[1:-1])
    edges = np.unique([np.nextafter(before.sample[0], -np.inf), *deciles])
    counts = [
        np.bincount(np.searchsorted(edges, sample, side="left"), minlength=len(edges) + 1)
        for sample in (before.sample, now.sample)
    ]
    test = ks_2samp(before.sample, now.sample, method="asymp")
    yield FeatureDrift(
        feature=feature,
        psi=psi(counts[0], counts[1]),
        test="ks",
        statistic=float(test.statistic),
        p_value=float(test.pvalue),
    )


def categorical_drift(feature: str, before: Mapping[str, int], now: Mapping[str, int]) -> Iterator[FeatureDrift]:
    """Yield PSI over categories, and the chi-squared test of independence."""
    if min(sum(before.values()), sum(now.values())) < MIN_SAMPLE_VALUES:
        return
    from scipy.stats import chi2_contingency

    values = sorted(before.keys() | now.keys())
    table = np.array([[counts.get(value, 0) for value in values] for counts in (before, now)])
    statistic, p_value = (0.0, 1.0) if len(values) < 2 else chi2_contingency(table)[:2]
    yield FeatureDrift(
        feature=feature,
        psi=psi(table[0], table[1]),
        test="chi2",
        statistic=float(statistic),
        p_value=float(p_value),
        new=tuple(sorted(now.keys() - before.keys())),
    )


def psi(before: NDArray[np.int64], now: NDArray[np.int64]) -> float:
    """Return the population stability index of counts over equal bins.

    0.1 is a small shift, 0.25 a large one.
    """
    shares = [np.maximum(counts / max(counts.sum(), 1), MIN_SHARE) for counts in (before, now)]
    return float(((shares[1] - shares[0]) * np.log(shares[1] / shares[0])).sum())
