"""Drift: none for equal data, found for shifted data, with textbook measures."""

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from recipes.contracts.validation_results import ColumnStatistics, Drift, FeatureDrift, Numbers, Statistics, Vocabulary
from recipes.validation.drift import SampledMoments, compare_versions, psi


def numbers(values: list[float]) -> Numbers:
    moments = SampledMoments()
    moments.add(np.array(values), np.ones(len(values), dtype=bool))
    return moments.numbers()


def statistics(lengths: list[float], **columns: ColumnStatistics) -> Statistics:
    return Statistics(
        records=len(lengths),
        sampled=len(lengths),
        columns=columns,
        layouts={},
        characters=numbers(lengths),
        words=numbers(lengths),
        vocabulary=Vocabulary(words=0, distinct=0, once=0, top={}),
        duplicates=0,
        near_duplicates=None,
        personal_data={},
    )


def drawn(seed: int, shape: Callable[[random.Random], float]) -> list[float]:
    chance = random.Random(seed)
    return [shape(chance) for _ in range(2000)]


def feature(drift: Drift, name: str) -> FeatureDrift:
    (found,) = [each for each in drift.features if each.feature == name]
    return found


def test_two_draws_of_one_distribution_do_not_drift() -> None:
    one = statistics(drawn(1, lambda chance: chance.gauss(100, 20)))
    other = statistics(drawn(2, lambda chance: chance.gauss(100, 20)))
    found = feature(compare_versions("d@1", one, other), "characters of a record")
    assert found.psi < 0.05
    assert found.p_value > 0.01


@pytest.mark.requirement("D4")
def test_a_moved_distribution_drifts() -> None:
    one = statistics(drawn(1, lambda chance: chance.gauss(100, 20)))
    other = statistics(drawn(2, lambda chance: chance.gauss(120, 20)))
    found = feature(compare_versions("d@1", one, other), "characters of a record")
    assert found.psi > 0.5
    assert found.p_value < 1e-9
    assert found.statistic == pytest.approx(math.erf(0.5 / math.sqrt(2)), abs=0.05)  # normal, one deviation apart


@pytest.mark.parametrize(("before", "after"), [(5.0, 6.0), (5.0, 4.0)])
def test_a_constant_that_becomes_another_drifts(before: float, after: float) -> None:
    found = feature(compare_versions("d@1", statistics([before] * 50), statistics([after] * 50)), "characters of a record")
    assert found.psi > 1
    assert (
        feature(compare_versions("d@1", statistics([before] * 50), statistics([before] * 50)), "characters of a record").psi
        == 0
    )


def category(**counts: int) -> ColumnStatistics:
    return ColumnStatistics(kinds={"string": 100}, filled=100, categories=counts)


def test_categories_are_compared_by_psi_and_chi_squared() -> None:
    one, other = (
        statistics([1.0] * 100, region=category(n=50, s=50)),
        statistics([1.0] * 100, region=category(n=80, s=15, w=5)),
    )
    found = feature(compare_versions("d@1", one, other), "region")
    assert (found.test, found.new) == ("chi2", ("w",))
    assert found.p_value < 1e-4
    expected = sum((b - a) * math.log(b / a) for a, b in ((0.5, 0.8), (0.5, 0.15), (1e-4, 0.05)))
    assert found.psi == pytest.approx(expected)


def test_too_few_values_are_not_compared() -> None:
    assert compare_versions("d@1", statistics([1.0] * 10), statistics([9.0] * 10)).features == ()


def test_psi_of_equal_shares_is_zero() -> None:
    assert psi(np.array([1, 2, 3]), np.array([10, 20, 30])) == pytest.approx(0)


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ({"string": 5}, {"string": 5}, {}),
        ({"string": 5}, {"integer": 5}, {"c": ("string", "integer")}),
        ({"string": 5}, {"string": 4, "missing": 1}, {"c": ("string", "string?")}),
        ({"string": 5}, {"string": 4, "null": 1}, {"c": ("string", "string?")}),
        ({"integer": 5}, {"integer": 3, "number": 2}, {"c": ("integer", "integer|number")}),
    ],
)
def test_changed_column_types_are_reported(before: dict[str, int], now: dict[str, int], expected: dict[str, Any]) -> None:
    one = statistics([1.0] * 5, c=ColumnStatistics(kinds=before, filled=5), gone=category())
    other = statistics([1.0] * 5, c=ColumnStatistics(kinds=now, filled=5), new=category())
    found = compare_versions("d@1", one, other)
    assert (found.retyped, list(found.added), list(found.removed)) == (expected, ["new"], ["gone"])
