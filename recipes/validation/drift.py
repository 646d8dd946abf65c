"""Compare a version with its reference by schema, PSI, Kolmogorov-Smirnov and chi-squared tests."""

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from recipes.contracts.validation_results import ColumnStatistics, Drift, FeatureDrift, Numbers, Statistics

QUANTILE_BINS = 10
MIN_SHARE = 1e-4
"""Stands for an empty bin, whose logarithm there is not."""
MIN_SAMPLE_VALUES = 20
"""Values that both samples need: with fewer, chance looks like drift."""


def compare_versions(name: str, reference: Statistics, current: Statistics) -> Drift:
    """`current` against `reference`, which is the version `name`."""
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
    """Column -> its types but null; `?` where it is not always there."""
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
    """PSI over the reference's deciles, and the two-sample Kolmogorov-Smirnov test."""
    if before is None or now is None or min(len(before.sample), len(now.sample)) < MIN_SAMPLE_VALUES:
        return
    from scipy.stats import ks_2samp  # takes a second to import, and a first version is compared with nothing

    # A value that equals an edge is in the bin below it, and what is below all of the reference has a bin of its own: else
    # a constant would fall together with all that is larger, or smaller.
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
    """PSI over the values, and the chi-squared test of independence."""
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
    """Population stability index of two counts over the same bins: 0.1 is a small shift, 0.25 a large one."""
    shares = [np.maximum(counts / max(counts.sum(), 1), MIN_SHARE) for counts in (before, now)]
    return float(((shares[1] - shares[0]) * np.log(shares[1] / shares[0])).sum())
