"""Judge a version: derive a verdict for each check from statistics and a policy.

Pure functions.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from recipes.contracts.dataset_contract import Measures, Slices
from recipes.contracts.frozen_model import FrozenModel
from recipes.contracts.quantities import parse_duration, pluralize
from recipes.contracts.validation_results import Drift, Leaks, Slice, Statistics, ValidationFacts
from resources.datasets.check_policy import BiasCheck, Check, Checks, CompletenessCheck, DriftCheck, FreshnessCheck

MAX_NAMED = 5
"""Maximum number of examples in a reason; the others are only counted."""


class Verdict(FrozenModel):
    """The result of a check.

    `reasons` has a line for each problem; `note` says what was examined.
    """

    check: Check
    passed: bool
    severity: Literal["warn", "error"]
    blocking: bool
    reasons: tuple[str, ...] = ()
    note: str = ""

    @property
    def blocks(self) -> bool:
        return self.blocking and not self.passed

    @property
    def sentence(self) -> str:
        return "; ".join(self.reasons) if self.reasons else self.note or "passed"


def judge_version(
    facts: ValidationFacts,
    statistics: Statistics,
    checks: Checks,
    measures: Measures,
    *,
    created_at: int,
    now: int,
) -> list[Verdict]:
    """Run all checks of a version's records.

    Times are in milliseconds since 1970; `created_at` is the version's.
    """
    newest = statistics.newest if statistics.newest is not None else created_at
    found: Mapping[Check, tuple[Sequence[str], str]] = {
        Check.CONTRACT: (find_contract_problems(facts), f"kept by all: {pluralize(statistics.records, 'record')}"),
        Check.COMPLETENESS: (
            list(find_incomplete_columns(statistics, checks.completeness)),
            describe_least_filled(statistics),
        ),
        Check.FRESHNESS: (
            [*find_missing_timestamps(statistics, measures), *find_staleness(newest, now, checks.freshness)],
            f"the newest record is {format_days(newest, now)} days old",
        ),
        Check.DUPLICATES: judge_share(
            "equal to an earlier record", statistics.duplicates, statistics, checks.duplicates.threshold
        ),
        Check.NEAR_DUPLICATES: judge_share(
            "nearly equal to an earlier record", statistics.near_duplicates, statistics, checks.near_duplicates.threshold
        )
        if statistics.near_duplicates is not None
        else ((), "not looked for: measures.near_duplicates is null"),
        Check.PERSONAL_DATA: judge_personal_data(statistics, checks.personal_data.threshold),
        Check.SCHEMA_DRIFT: (list(find_schema_drift(facts.drift)), describe_reference(facts.drift)),
        Check.DRIFT: (list(find_drift(facts.drift, checks.drift)), describe_reference(facts.drift)),
        Check.BIAS: (
            [*find_unknown_slices(statistics, measures.slices), *find_bias(statistics, checks.bias)],
            "" if statistics.slices else "no column to slice by is declared",
        ),
    }
    return [make_verdict(check, reasons, note, checks) for check, (reasons, note) in found.items()]


def judge_splits(leaks: Leaks, checks: Checks) -> Verdict:
    """Check whether records of the test split are in an ancestor's training data."""
    count = leaks.exact + leaks.near
    note = (
        f"looked for {pluralize(leaks.tested, 'test record')} in the training records of "
        f"{pluralize(leaks.searched, 'ancestor')}"
    )
    if count <= checks.leakage.threshold * leaks.tested:
        return make_verdict(Check.LEAKAGE, (), note, checks)
    by_ancestor = ", ".join(f"{ancestor} has {number}" for ancestor, number in sorted(leaks.by_ancestor.items()))
    reasons = [
        f"{leaks.exact} of {pluralize(leaks.tested, 'test record')} were trained on, {leaks.near} more nearly: {by_ancestor}"
    ]
    reasons += [
        f"test line {leak.line} is {leak.ancestor} line {leak.ancestor_line} ({leak.match} {leak.similarity:.2f})"
        for leak in leaks.first[:MAX_NAMED]
    ]
    return make_verdict(Check.LEAKAGE, reasons, note, checks)


def make_verdict(check: Check, reasons: Sequence[str], note: str, checks: Checks) -> Verdict:
    policy = checks.policy_for(check)
    return Verdict(
        check=check,
        passed=not reasons,
        severity=policy.severity,
        blocking=policy.blocking,
        reasons=tuple(reasons),
        note=note,
    )


def find_contract_problems(facts: ValidationFacts) -> list[str]:
    found = facts.violations
    if not found.count:
        return []
    named = [f"line {each.line}, {each.column} {each.reason}" for each in found.first[:MAX_NAMED]]
    return [f"broken by {pluralize(found.records, 'record')} in {pluralize(found.count, 'place')}", *named]


def find_incomplete_columns(statistics: Statistics, policy: CompletenessCheck) -> Iterator[str]:
    for name in policy.columns or statistics.columns:
        column = statistics.columns.get(name)
        filled = column.filled / statistics.records if column is not None and statistics.records else 0.0
        if filled < policy.threshold:
            yield f"{name} is filled in {filled:.1%} of the records, required are {policy.threshold:.1%}"


DAY_MS = 86_400_000
"""A day in milliseconds: a timestamp without a time zone may be this far in the future."""


def find_staleness(newest: int, now: int, policy: FreshnessCheck) -> Iterator[str]:
    if policy.max_age is not None and newest > now + DAY_MS:
        yield f"the newest record says that it was made {format_days(now, newest)} days from now: correct it"
    elif policy.max_age is not None and (now - newest) / 1000 > parse_duration(policy.max_age):
        yield f"the newest record is {format_days(newest, now)} days old, allowed are {policy.max_age}"


def find_missing_timestamps(statistics: Statistics, measures: Measures) -> Iterator[str]:
    if measures.timestamp is not None and statistics.newest is None:
        yield f"no record says in '{measures.timestamp}' when it was made: correct measures.timestamp"


def format_days(since: int, now: int) -> str:
    return f"{(now - since) / DAY_MS:.1f}"


def describe_least_filled(statistics: Statistics) -> str:
    """Describe the column with the fewest values."""
    if not statistics.columns or not statistics.records:
        return ""
    name, column = min(statistics.columns.items(), key=lambda item: item[1].filled)
    return f"the least filled column is {name}, in {column.filled / statistics.records:.1%} of the records"


def judge_share(condition: str, count: int, statistics: Statistics, threshold: float) -> tuple[list[str], str]:
    found = count / max(statistics.records, 1)
    line = f"{pluralize(count, 'record')} ({found:.1%}) {'is' if count == 1 else 'are'} {condition}"
    return ([f"{line}, allowed are {threshold:.1%}"], "") if found > threshold else ([], line)


def judge_personal_data(statistics: Statistics, threshold: float) -> tuple[list[str], str]:
    count = sum(statistics.personal_data.values())
    kinds = ", ".join(f"{number} {kind}" for kind, number in statistics.personal_data.items())
    if count > threshold * statistics.records:
        return [f"personal data or secrets: {kinds}; mask them with `hanzo-ml dataset prepare`"], ""
    return [], kinds or "no personal data or secrets were found"


def describe_reference(drift: Drift | None) -> str:
    return f"against {drift.reference}" if drift is not None else "no earlier version to compare with"


def find_schema_drift(drift: Drift | None) -> Iterator[str]:
    if drift is not None:
        yield from (f"{column} is new ({kind}), {drift.reference} did not have it" for column, kind in drift.added.items())
        yield from (f"{column} ({kind}) is gone, {drift.reference} had it" for column, kind in drift.removed.items())
        yield from (
            f"{column} was {before} in {drift.reference} and is {now}" for column, (before, now) in drift.retyped.items()
        )


def find_drift(drift: Drift | None, policy: DriftCheck) -> Iterator[str]:
    for each in drift.features if drift is not None else ():
        if each.psi > policy.threshold and each.p_value < policy.significance:
            assert drift is not None
            new = f", new: {', '.join(each.new[:MAX_NAMED])}" if each.new else ""
            yield (
                f"{each.feature} moved from {drift.reference}: PSI {each.psi:.2f}, allowed {policy.threshold:g} "
                f"({each.test} {each.statistic:.2f}, p {each.p_value:.1g}{new})"
            )


def find_unknown_slices(statistics: Statistics, slices: Slices) -> Iterator[str]:
    """Report undeclared columns: a misspelled column must not look like one without bias."""
    for column in (*slices.columns, slices.label):
        if column is not None and column not in statistics.columns:
            yield f"no record has the column '{column}': correct measures.slices"


def find_bias(statistics: Statistics, policy: BiasCheck) -> Iterator[str]:
    for column in dict.fromkeys(each.column for each in statistics.slices):
        slices = [each for each in statistics.slices if each.column == column]
        total = sum(each.records for each in slices)
        overall: dict[str, int] = {}
        for each in slices:
            for label, count in each.labels.items():
                overall[label] = overall.get(label, 0) + count
        for each in slices:
            name, part = f"{column}={each.value}", each.records / total
            if part < policy.min_share:
                yield f"{name} has {part:.1%} of the records, required are {policy.min_share:.1%}"
            if (distance := label_distance(each, overall)) > policy.threshold:
                yield f"{name}: {distance:.0%} of its labels differ from those of all, allowed are {policy.threshold:.0%}"


def label_distance(each: Slice, overall: Mapping[str, int]) -> float:
    """Return the total variation distance of a slice's labels from those of all slices.

    0 without labels.
    """
    own_total, overall_total = sum(each.labels.values()), sum(overall.values())
    if not own_total or not overall_total:
        return 0.0
    return sum(abs(each.labels.get(label, 0) / own_total - count / overall_total) for label, count in overall.items()) / 2
