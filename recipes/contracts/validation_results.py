"""Results of validate and find_leaks: violations, statistics, drift and leaks."""

from typing import Literal

from pydantic import Field

from recipes.contracts.frozen_model import FrozenModel

STATISTICS_FILE = "statistics.json"
"""The only file of an artifact of kind `statistics`."""
MAX_NAMED_RECORDS = 20
"""Maximum violations and leaks listed in a result; further ones are only counted."""


class Violation(FrozenModel):
    """A record that violates a rule. `line` counts the version's records from 1."""

    line: int
    column: str
    reason: str
    value: str = Field("", description="beginning of the column's value")


class Violations(FrozenModel):
    """Counts of violations by column and reason, and the first few."""

    count: int = 0
    records: int = 0
    by_reason: dict[str, int] = {}
    first: tuple[Violation, ...] = ()


class Numbers(FrozenModel):
    """A distribution: exact moments of all values, and the sorted values of sampled records."""

    count: int
    mean: float | None
    minimum: float | None
    maximum: float | None
    sample: tuple[float, ...] = ()


class ColumnStatistics(FrozenModel):
    """Statistics of a column.

    Number of records by JSON type (`missing` if absent), and its values. `numbers` describes numeric values, `lengths` texts
    and arrays; `categories` counts sampled values if there are few distinct ones.
    """

    kinds: dict[str, int]
    filled: int = Field(description="number of records in which it is neither missing, null, nor empty")
    numbers: Numbers | None = None
    lengths: Numbers | None = None
    categories: dict[str, int] | None = None


class Vocabulary(FrozenModel):
    """Words (runs of letters and digits, in lower case) of sampled records."""

    words: int
    distinct: int
    once: int
    top: dict[str, int]


class Slice(FrozenModel):
    """Records that share a value of a column.

    `labels` counts the most frequent labels.
    """

    column: str
    value: str
    records: int
    mean_characters: float
    labels: dict[str, int] = {}


class Statistics(FrozenModel):
    """Statistics of a version's records. Times are in milliseconds."""

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
    """Change of a distribution: population stability index and a test, "ks" (Kolmogorov-Smirnov) or "chi2"."""

    feature: str
    psi: float
    test: Literal["ks", "chi2"]
    statistic: float
    p_value: float
    new: tuple[str, ...] = Field((), description="values that the reference did not have")


class Drift(FrozenModel):
    """Drift of a version against its reference; both by name, as NAME@VERSION."""

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
    """A test record found in training data, with its lines in both."""

    line: int
    text: str
    match: Literal["exact", "near"]
    similarity: float
    ancestor: str
    ancestor_line: int


class Leaks(FrozenModel):
    """`Result.facts` of the program find_leaks.

    Counts are of test records; `by_ancestor` counts one in each that contains it.
    """

    tested: int
    searched: int
    exact: int
    near: int
    by_ancestor: dict[str, int] = {}
    first: tuple[Leak, ...] = ()
