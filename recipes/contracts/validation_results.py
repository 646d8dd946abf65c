"""Results of validate and find_leaks, such as violations, statistics, drift and leaks."""

from typing import Literal

from pydantic import Field

from recipes.contracts.frozen_model import FrozenModel

STATISTICS_FILE = "statistics.json"
"""The one file of an artifact of the kind `statistics`."""
MAX_NAMED_RECORDS = 20
"""Violations and leaks that a result names; beyond them it counts."""


class Violation(FrozenModel):
    """A record that breaks a rule. `line` counts the version's records from 1."""

    line: int
    column: str
    reason: str
    value: str = Field("", description="the beginning of what stands there")


class Violations(FrozenModel):
    """How often rules were broken, by column and reason, and the first few."""

    count: int = 0
    records: int = 0
    by_reason: dict[str, int] = {}
    first: tuple[Violation, ...] = ()


class Numbers(FrozenModel):
    """A distribution: exact moments of all values, and the values of the sampled records in rising order."""

    count: int
    mean: float | None
    minimum: float | None
    maximum: float | None
    sample: tuple[float, ...] = ()


class ColumnStatistics(FrozenModel):
    """A column: how many records have which JSON type in it (`missing` where it is not there), and what it holds.

    `numbers` are the values of numbers, `lengths` those of texts and arrays; `categories` the counts in the sample where
    there are few different values.
    """

    kinds: dict[str, int]
    filled: int = Field(description="records in which it is neither missing, null, nor empty")
    numbers: Numbers | None = None
    lengths: Numbers | None = None
    categories: dict[str, int] | None = None


class Vocabulary(FrozenModel):
    """Words (runs of letters and digits, in lower case) of the sampled records."""

    words: int
    distinct: int
    once: int
    top: dict[str, int]


class Slice(FrozenModel):
    """The records that have one value in a column. `labels` maps a label to its count, in the most frequent ones."""

    column: str
    value: str
    records: int
    mean_characters: float
    labels: dict[str, int] = {}


class Statistics(FrozenModel):
    """What a version's records are like. Times in milliseconds."""

    format: int = 1
    records: int
    sampled: int
    columns: dict[str, ColumnStatistics]
    layouts: dict[str, int]
    characters: Numbers
    words: Numbers
    vocabulary: Vocabulary
    languages: dict[str, int] = {}
    duplicates: int
    near_duplicates: int | None
    personal_data: dict[str, int]
    newest: int | None = None
    slices: tuple[Slice, ...] = ()
    examples: tuple[str, ...] = Field((), description="the first few records, as JSON")


class FeatureDrift(FrozenModel):
    """How a distribution moved: its population stability index, and a test that is "ks" (Kolmogorov-Smirnov) or "chi2"."""

    feature: str
    psi: float
    test: Literal["ks", "chi2"]
    statistic: float
    p_value: float
    new: tuple[str, ...] = Field((), description="values that the reference did not have")


class Drift(FrozenModel):
    """A version against its reference; both by name, as NAME@VERSION."""

    reference: str
    added: dict[str, str] = {}
    removed: dict[str, str] = {}
    retyped: dict[str, tuple[str, str]] = {}
    features: tuple[FeatureDrift, ...] = ()


class ValidationFacts(FrozenModel):
    """`Result.facts` of the program validate."""

    violations: Violations
    drift: Drift | None = None


class Leak(FrozenModel):
    """A test record, by its line in the test split, that stands in what was trained on, by the line there."""

    line: int
    text: str
    match: Literal["exact", "near"]
    similarity: float
    ancestor: str
    ancestor_line: int


class Leaks(FrozenModel):
    """`Result.facts` of the program find_leaks. Counts are of test records; `by_ancestor` counts one in each that has it."""

    tested: int
    searched: int
    exact: int
    near: int
    by_ancestor: dict[str, int] = {}
    first: tuple[Leak, ...] = ()
