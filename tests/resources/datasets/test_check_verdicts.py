"""Check verdicts: each check fails only for its own reason, with an explanation.

A value equal to the threshold passes.
"""

from typing import Any

import pytest
from pydantic import ValidationError

from recipes.contracts.dataset_contract import Measures, Slices
from recipes.contracts.validation_results import (
    ColumnStatistics,
    Drift,
    FeatureDrift,
    Leak,
    Leaks,
    Numbers,
    Slice,
    Statistics,
    ValidationFacts,
    Violation,
    Violations,
    Vocabulary,
)
from resources.datasets.check_policy import Check, CheckPolicy, Checks
from resources.datasets.check_verdicts import judge_splits, judge_version

NOTHING = Numbers(count=0, mean=None, minimum=None, maximum=None)
DAY = 86_400_000
NOW = 100 * DAY


def statistics(**more: Any) -> Statistics:
    fields: dict[str, Any] = {
        "records": 100,
        "sampled": 100,
        "columns": {"text": ColumnStatistics(kinds={"string": 100}, filled=100)},
        "layouts": {"text": 100},
        "characters": NOTHING,
        "words": NOTHING,
        "vocabulary": Vocabulary(words=0, distinct=0, once=0, top={}),
        "duplicates": 0,
        "near_duplicates": 0,
        "personal_data": {},
    }
    return Statistics(**fields | more)


def failed(
    found: Statistics | None = None, *, facts: ValidationFacts | None = None, checks: dict[str, Any] | None = None
) -> dict[str, str]:
    """Return the failure explanation of each failed check."""
    facts = facts or ValidationFacts(violations=Violations())
    policy = Checks.model_validate(checks or {})
    verdicts = judge_version(facts, found or statistics(), policy, Measures(), created_at=NOW - DAY, now=NOW)
    assert {verdict.check for verdict in verdicts} == set(Check) - {Check.LEAKAGE}
    return {verdict.check: verdict.sentence for verdict in verdicts if not verdict.passed}


def drift(**more: Any) -> ValidationFacts:
    return ValidationFacts(violations=Violations(), drift=Drift(reference="d@1", **more))


def feature(**more: Any) -> FeatureDrift:
    return FeatureDrift(**{"feature": "words", "psi": 0.5, "test": "ks", "statistic": 0.4, "p_value": 1e-9, **more})


def test_a_good_version_passes_every_check() -> None:
    assert failed() == {}
    assert failed(facts=drift(features=(feature(psi=0.1),))) == {}


def test_broken_contract_is_reported_with_counts_and_the_first_violation() -> None:
    broken = Violations(count=2, records=1, first=(Violation(line=7, column="a", reason="must be string", value="1"),))
    reason = failed(facts=ValidationFacts(violations=broken))["contract"]
    assert reason == "broken by 1 record in 2 places; line 7, a must be string"


@pytest.mark.parametrize(
    ("found", "checks", "expected"),
    [
        ({"duplicates": 1}, {}, {}),
        (
            {"duplicates": 1},
            {"duplicates": {"threshold": 0.001}},
            {"duplicates": "1 record (1.0%) is equal to an earlier record, allowed are 0.1%"},
        ),
        ({"duplicates": 2}, {}, {"duplicates": "2 records (2.0%) are equal to an earlier record, allowed are 1.0%"}),
        ({"near_duplicates": 10}, {}, {}),
        ({"near_duplicates": None}, {}, {}),
        (
            {"near_duplicates": 11},
            {},
            {"near_duplicates": "11 records (11.0%) are nearly equal to an earlier record, allowed are 10.0%"},
        ),
        ({"newest": NOW - 2 * DAY}, {"freshness": {"max_age": "2d"}}, {}),
        (
            {"newest": NOW - 3 * DAY},
            {"freshness": {"max_age": "2d"}},
            {"freshness": "the newest record is 3.0 days old, allowed are 2d"},
        ),
        ({"newest": NOW + DAY}, {"freshness": {"max_age": "2d"}}, {}),
        (
            {"newest": NOW + 3 * DAY},
            {"freshness": {"max_age": "2d"}},
            {"freshness": "the newest record says that it was made 3.0 days from now: correct it"},
        ),
        ({}, {"freshness": {"max_age": "12h"}}, {"freshness": "the newest record is 1.0 days old, allowed are 12h"}),
        ({"personal_data": {"email": 1}}, {"personal_data": {"threshold": 0.01}}, {}),
        (
            {"columns": {"a": ColumnStatistics(kinds={"string": 100}, filled=94)}},
            {"completeness": {"threshold": 0.95}},
            {"completeness": "a is filled in 94.0% of the records, required are 95.0%"},
        ),
        (
            {},
            {"completeness": {"threshold": 0.5, "columns": ["label"]}},
            {"completeness": "label is filled in 0.0% of the records, required are 50.0%"},
        ),
    ],
)
def test_shares_are_judged_against_their_thresholds(
    found: dict[str, Any], checks: dict[str, Any], expected: dict[str, str]
) -> None:
    assert failed(statistics(**found), checks=checks) == expected


def test_personal_data_is_reported_by_kind() -> None:
    assert "2 email, 1 iban" in failed(statistics(personal_data={"email": 2, "iban": 1}))["personal_data"]


def test_drift_needs_both_a_large_shift_and_more_than_chance() -> None:
    assert failed(facts=drift(features=(feature(p_value=0.2),))) == {}
    assert failed(facts=drift(features=(feature(psi=0.19),))) == {}
    assert "words moved from d@1: PSI 0.50" in failed(facts=drift(features=(feature(),)))["drift"]
    assert failed(facts=drift(features=(feature(),)), checks={"drift": {"threshold": 0.6}}) == {}


@pytest.mark.requirement("D3")
def test_schema_drift_names_new_gone_and_retyped_columns() -> None:
    reason = failed(facts=drift(added={"a": "string"}, removed={"b": "string"}, retyped={"c": ("string", "integer")}))
    assert reason["schema_drift"].split("; ") == [
        "a is new (string), d@1 did not have it",
        "b (string) is gone, d@1 had it",
        "c was string in d@1 and is integer",
    ]


def test_slice_that_is_too_small_or_labelled_differently_is_biased() -> None:
    def sliced(value: str, records: int, **labels: int) -> Slice:
        return Slice(column="region", value=value, records=records, mean_characters=1, labels=labels)

    even = statistics(slices=(sliced("n", 50, yes=25, no=25), sliced("s", 50, yes=26, no=24)))
    assert failed(even, checks={"bias": {"min_share": 0.5}}) == {}
    odd = statistics(slices=(sliced("n", 90, yes=45, no=45), sliced("s", 10, yes=10)))
    reasons = failed(odd, checks={"bias": {"min_share": 0.2}})["bias"].split("; ")
    assert reasons[0] == "region=s has 10.0% of the records, required are 20.0%"
    assert reasons[1] == "region=s: 45% of its labels differ from those of all, allowed are 30%"


def test_measure_of_a_missing_column_is_a_warning() -> None:
    def reasons(columns: dict[str, ColumnStatistics], newest: int | None) -> dict[str, str]:
        measures = Measures(timestamp="at", slices=Slices(columns=("region",), label="label"))
        found = statistics(columns=columns, newest=newest)
        facts = ValidationFacts(violations=Violations())
        verdicts = judge_version(facts, found, Checks(), measures, created_at=NOW, now=NOW)
        return {verdict.check: verdict.sentence for verdict in verdicts if not verdict.passed}

    column = ColumnStatistics(kinds={"string": 100}, filled=100)
    assert reasons({"region": column, "label": column}, NOW) == {}
    assert reasons({"label": column}, None) == {
        "freshness": "no record says in 'at' when it was made: correct measures.timestamp",
        "bias": "no record has the column 'region': correct measures.slices",
    }
    assert "'label'" in reasons({"region": column}, NOW)["bias"]


def test_check_that_did_not_run_is_noted_as_not_run() -> None:
    facts = ValidationFacts(violations=Violations())
    verdicts = judge_version(facts, statistics(near_duplicates=None), Checks(), Measures(), created_at=NOW, now=NOW)
    (note,) = (verdict.note for verdict in verdicts if verdict.check == "near_duplicates")
    assert note.startswith("not looked for")


def test_leaks_are_named_with_their_ancestor() -> None:
    leak = Leak(line=3, text="x", match="near", similarity=0.9, ancestor="d@1 train, of m@1", ancestor_line=8)
    found = Leaks(tested=10, searched=2, exact=0, near=1, by_ancestor={"d@1 train, of m@1": 1}, first=(leak,))
    verdict = judge_splits(found, Checks())
    assert not verdict.passed
    assert "test line 3 is d@1 train, of m@1 line 8 (near 0.90)" in verdict.reasons
    assert judge_splits(found, Checks.model_validate({"leakage": {"threshold": 0.1}})).passed
    assert judge_splits(Leaks(tested=10, searched=2, exact=0, near=0), Checks()).passed
    one = judge_splits(Leaks(tested=1, searched=1, exact=0, near=0), Checks())
    assert one.note == "looked for 1 test record in the training records of 1 ancestor"


def test_only_a_blocking_check_that_failed_blocks() -> None:
    broken = ValidationFacts(violations=Violations(count=1, records=1))
    verdicts = judge_version(broken, statistics(duplicates=50), Checks(), Measures(), created_at=NOW, now=NOW)
    assert [verdict.check for verdict in verdicts if verdict.blocks] == ["contract"]
    harmless = Checks.model_validate({"contract": {"severity": "warn"}})
    assert not any(
        verdict.blocks for verdict in judge_version(broken, statistics(), harmless, Measures(), created_at=NOW, now=NOW)
    )


def test_blocking_check_must_have_severity_error() -> None:
    with pytest.raises(ValidationError, match="needs `severity: error`"):
        CheckPolicy(severity="warn", blocking=True)
