"""What was found of a dataset version (rows B13, D3-D5)."""

from typing import Literal

from api.openapi.v1.artifacts import Artifact
from api.openapi.v1.datasets import CheckStatus
from api.schemas.mlflow.responses import Message


class CheckVerdict(Message):
    """`reasons` has a line for each thing that is wrong; `note` says what was looked at."""

    check: Literal[
        "contract",
        "completeness",
        "freshness",
        "duplicates",
        "near_duplicates",
        "personal_data",
        "schema_drift",
        "drift",
        "bias",
        "leakage",
    ]
    passed: bool
    severity: Literal["warn", "error"]
    blocking: bool
    reasons: list[str]
    note: str


class BrokenRule(Message):
    """A record that breaks a rule. `line` counts the version's records from 1; `value` is the beginning of what is there."""

    line: int
    column: str
    reason: str
    value: str


class BrokenRules(Message):
    """How often rules were broken, by column and reason, and the first few."""

    count: int
    records: int
    by_reason: dict[str, int]
    first: list[BrokenRule]


class FeatureDrift(Message):
    """How a distribution moved. `new` are values that the reference did not have."""

    feature: str
    psi: float
    test: Literal["ks", "chi2"]
    statistic: float
    p_value: float
    new: list[str]


class DatasetDrift(Message):
    """The version against its reference, which is NAME@VERSION."""

    reference: str
    added: dict[str, str]
    removed: dict[str, str]
    retyped: dict[str, tuple[str, str]]
    features: list[FeatureDrift]


class Leak(Message):
    """A test record that stands in what was trained on, each by its line."""

    line: int
    text: str
    match: Literal["exact", "near"]
    similarity: float
    ancestor: str
    ancestor_line: int


class Leaks(Message):
    """Counts are of test records; `by_ancestor` counts one in each that has it."""

    tested: int
    searched: int
    exact: int
    near: int
    by_ancestor: dict[str, int]
    first: list[Leak]


class UncheckedDataset(Message):
    """`checks` and `blocked` are empty and `checked_at` is null until the version is checked.

    `problem` is why it could not be checked or split when that was last tried, at `problem_at`.
    """

    dataset_id: str
    name: str
    version: int
    problem: str
    problem_at: int | None
    status: CheckStatus
    blocked: str
    checks: list[CheckVerdict]
    checked_at: int | None


class CheckedDataset(UncheckedDataset):
    """`drift` is null where there was nothing to compare with, `leaks` until the version is split."""

    violations: BrokenRules
    drift: DatasetDrift | None
    leaks: Leaks | None
    statistics: Artifact


class CheckRequested(Message):
    """`event` is the `seq` of the event that asks for it."""

    dataset_id: str
    event: int
