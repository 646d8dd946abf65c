"""Judging a version: its statistics and a policy -> one verdict for each check. Pure: the same input, the same verdicts."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from recipes.contracts.dataset_contract import Measures, Slices
from recipes.contracts.frozen_model import Frozen
from recipes.contracts.quantities import seconds_of
from recipes.contracts.validation_results import Drift, Leaks, Slice, Statistics, ValidationFacts
from recipes.counted import counted
from resources.datasets.check_policy import BiasCheck, Check, Checks, CompletenessCheck, DriftCheck, FreshnessCheck

NAMED = 5
"""Things that a reason names; of the others it says how many there are."""


class Verdict(Frozen):
    """What a check said. `reasons` has a line for each thing that is wrong; `note` says what was looked at."""

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
    """All checks of a version's records. Times in milliseconds; `created_at` is the version's own."""
    newest = statistics.newest if statistics.newest is not None else created_at
    found: Mapping[Check, tuple[Sequence[str], str]] = {
        Check.CONTRACT: (contract(facts), f"kept by all: {counted(statistics.records, 'record')}"),
        Check.COMPLETENESS: (list(incomplete(statistics, checks.completeness)), least_filled(statistics)),
        Check.FRESHNESS: (
            [*timeless(statistics, measures), *stale(newest, now, checks.freshness)],
            f"the newest record is {days(newest, now)} days old",
        ),
        Check.DUPLICATES: share(
            "equal to an earlier record", statistics.duplicates, statistics, checks.duplicates.threshold
        ),
        Check.NEAR_DUPLICATES: share(
            "nearly equal to an earlier record", statistics.near_duplicates, statistics, checks.near_duplicates.threshold
        )
        if statistics.near_duplicates is not None
        else ((), "not looked for: measures.near_duplicates is null"),
        Check.PERSONAL_DATA: personal_data(statistics, checks.personal_data.threshold),
        Check.SCHEMA_DRIFT: (list(schema_drift(facts.drift)), against(facts.drift)),
        Check.DRIFT: (list(drifted(facts.drift, checks.drift)), against(facts.drift)),
        Check.BIAS: (
            [*sliced_by_nothing(statistics, measures.slices), *biased(statistics, checks.bias)],
            "" if statistics.slices else "no column to slice by is declared",
        ),
    }
    return [verdict(check, reasons, note, checks) for check, (reasons, note) in found.items()]


def judge_splits(leaks: Leaks, checks: Checks) -> Verdict:
    """Whether the test split stands in what an ancestor was trained on."""
    count = leaks.exact + leaks.near
    note = (
        f"looked for {counted(leaks.tested, 'test record')} in the training records of {counted(leaks.searched, 'ancestor')}"
    )
    if count <= checks.leakage.threshold * leaks.tested:
        return verdict(Check.LEAKAGE, (), note, checks)
    by_ancestor = ", ".join(f"{ancestor} has {number}" for ancestor, number in sorted(leaks.by_ancestor.items()))
    reasons = [
        f"{leaks.exact} of {counted(leaks.tested, 'test record')} were trained on, {leaks.near} more nearly: {by_ancestor}"
    ]
    reasons += [
        f"test line {leak.line} is {leak.ancestor} line {leak.ancestor_line} ({leak.match} {leak.similarity:.2f})"
        for leak in leaks.first[:NAMED]
    ]
    return verdict(Check.LEAKAGE, reasons, note, checks)


def verdict(check: Check, reasons: Sequence[str], note: str, checks: Checks) -> Verdict:
    policy = checks.of(check)
    return Verdict(
        check=check,
        passed=not reasons,
        severity=policy.severity,
        blocking=policy.blocking,
        reasons=tuple(reasons),
        note=note,
    )


def contract(facts: ValidationFacts) -> list[str]:
    found = facts.violations
    if not found.count:
        return []
    named = [f"line {each.line}, {each.column} {each.reason}" for each in found.first[:NAMED]]
    return [f"broken by {counted(found.records, 'record')} in {counted(found.count, 'place')}", *named]


def incomplete(statistics: Statistics, policy: CompletenessCheck) -> Iterator[str]:
    for name in policy.columns or statistics.columns:
        column = statistics.columns.get(name)
        filled = column.filled / statistics.records if column is not None and statistics.records else 0.0
        if filled < policy.threshold:
            yield f"{name} is filled in {filled:.1%} of the records, required are {policy.threshold:.1%}"


DAY = 86_400_000
"""In milliseconds: a date without a zone may be so much ahead."""


def stale(newest: int, now: int, policy: FreshnessCheck) -> Iterator[str]:
    if policy.max_age is not None and newest > now + DAY:
        yield f"the newest record says that it was made {days(now, newest)} days from now: correct it"
    elif policy.max_age is not None and (now - newest) / 1000 > seconds_of(policy.max_age):
        yield f"the newest record is {days(newest, now)} days old, allowed are {policy.max_age}"


def timeless(statistics: Statistics, measures: Measures) -> Iterator[str]:
    if measures.timestamp is not None and statistics.newest is None:
        yield f"no record says in '{measures.timestamp}' when it was made: correct measures.timestamp"


def days(since: int, now: int) -> str:
    return f"{(now - since) / DAY:.1f}"


def least_filled(statistics: Statistics) -> str:
    """The column with the fewest values, in words."""
    if not statistics.columns or not statistics.records:
        return ""
    name, column = min(statistics.columns.items(), key=lambda item: item[1].filled)
    return f"the least filled column is {name}, in {column.filled / statistics.records:.1%} of the records"


def share(what: str, count: int, statistics: Statistics, threshold: float) -> tuple[list[str], str]:
    found = count / max(statistics.records, 1)
    line = f"{counted(count, 'record')} ({found:.1%}) {'is' if count == 1 else 'are'} {what}"
    return ([f"{line}, allowed are {threshold:.1%}"], "") if found > threshold else ([], line)


def personal_data(statistics: Statistics, threshold: float) -> tuple[list[str], str]:
    count = sum(statistics.personal_data.values())
    kinds = ", ".join(f"{number} {kind}" for kind, number in statistics.personal_data.items())
    if count > threshold * statistics.records:
        return [f"personal data or secrets: {kinds}; mask them with `hanzo-ml dataset prepare`"], ""
    return [], kinds or "no personal data or secrets were found"


def against(drift: Drift | None) -> str:
    return f"against {drift.reference}" if drift is not None else "no earlier version to compare with"


def schema_drift(drift: Drift | None) -> Iterator[str]:
    if drift is not None:
        yield from (f"{column} is new ({kind}), {drift.reference} did not have it" for column, kind in drift.added.items())
        yield from (f"{column} ({kind}) is gone, {drift.reference} had it" for column, kind in drift.removed.items())
        yield from (
            f"{column} was {before} in {drift.reference} and is {now}" for column, (before, now) in drift.retyped.items()
        )


def drifted(drift: Drift | None, policy: DriftCheck) -> Iterator[str]:
    for each in drift.features if drift is not None else ():
        if each.psi > policy.threshold and each.p_value < policy.significance:
            assert drift is not None
            new = f", new: {', '.join(each.new[:NAMED])}" if each.new else ""
            yield (
                f"{each.feature} moved from {drift.reference}: PSI {each.psi:.2f}, allowed {policy.threshold:g} "
                f"({each.test} {each.statistic:.2f}, p {each.p_value:.1g}{new})"
            )


def sliced_by_nothing(statistics: Statistics, slices: Slices) -> Iterator[str]:
    """A misspelt column must not look like one without bias."""
    for column in (*slices.columns, slices.label):
        if column is not None and column not in statistics.columns:
            yield f"no record has the column '{column}': correct measures.slices"


def biased(statistics: Statistics, policy: BiasCheck) -> Iterator[str]:
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
    """Total variation distance of a slice's labels from those of all slices; 0 without labels."""
    mine, all_of_them = sum(each.labels.values()), sum(overall.values())
    if not mine or not all_of_them:
        return 0.0
    return sum(abs(each.labels.get(label, 0) / mine - count / all_of_them) for label, count in overall.items()) / 2
