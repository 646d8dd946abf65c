"""Asset checks of a dataset: validation, policy and leakage search."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import dagster as dg

from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.definition_schema import DatasetDefinition
from hanzo_ml_assets.supervisor import run_program
from recipes.contracts.dataset_contract import FindLeaksParameters, ValidateParameters
from recipes.contracts.job import BadConfiguration, Hardware, Job, Program, Result
from recipes.contracts.validation_results import STATISTICS_FILE, Leaks, Statistics, ValidationFacts
from recipes.storage.manifest import Artifact, canonical_json
from resources.compute.base import JobFailed
from resources.datasets.check_policy import Check, Checks
from resources.datasets.check_verdicts import Verdict, judge_splits, judge_version
from resources.datasets.deletion import output_transaction, remove_leftovers
from resources.datasets.validation_report import bar_chart, histogram, markdown_image
from resources.datasets.validations import blocking_reason
from resources.lineage.edges import record_artifact
from resources.lineage.model_ancestry import Ancestry
from resources.metadata.dataset_problems import record_problem
from resources.metadata.datasets import DatasetVersion, lock_for_derivation
from resources.metadata.outbox import now_ms

OWN_TRAIN_SPLIT = "this version's own train"
CHECK_DESCRIPTIONS: Mapping[Check, str] = {
    Check.CONTRACT: "Every record satisfies the data contract.",
    Check.COMPLETENESS: "The columns are filled as required.",
    Check.FRESHNESS: "The newest record is recent enough.",
    Check.DUPLICATES: "No record occurs twice.",
    Check.NEAR_DUPLICATES: "Few records are nearly identical to another.",
    Check.PERSONAL_DATA: "There are no personal data and no secrets.",
    Check.SCHEMA_DRIFT: "Columns and types match the version that the production model was trained on.",
    Check.DRIFT: "Distributions match the version that the production model was trained on.",
    Check.BIAS: "No slice is too small or labelled differently from the others.",
    Check.LEAKAGE: "No test record occurs in the training data of this version or of any ancestor.",
}
SPLIT_CHECKS = (Check.LEAKAGE,)
SPLITS_FOLDER = "splits"
DERIVED_FOLDERS = (Program.VALIDATE, Program.FIND_LEAKS, SPLITS_FOLDER)
"""Folders of a version that hold what was derived from it."""


@dataclass(frozen=True)
class ValidationOutcome:
    """The measurements of a version's records, and the policy's verdicts."""

    statistics: Statistics
    facts: ValidationFacts
    verdicts: tuple[Verdict, ...]


def make_check_specs(checks: Checks, asset: Iterable[str], *, for_splits: bool) -> list[dg.AssetCheckSpec]:
    """Return the check specs of the version's asset, or of its splits."""
    return [
        dg.AssetCheckSpec(str(check), asset=list(asset), description=meaning, blocking=checks.policy_for(check).blocking)
        for check, meaning in CHECK_DESCRIPTIONS.items()
        if (check in SPLIT_CHECKS) is for_splits
    ]


def to_check_result(verdict: Verdict, asset: Iterable[str]) -> dg.AssetCheckResult:
    severity = dg.AssetCheckSeverity.ERROR if verdict.severity == "error" else dg.AssetCheckSeverity.WARN
    return dg.AssetCheckResult(
        check_name=str(verdict.check),
        asset_key=list(asset),
        passed=verdict.passed,
        severity=severity,
        description=verdict.sentence,
        metadata={"reasons": dg.MetadataValue.md("\n".join(f"- {escape_cell(reason)}" for reason in verdict.reasons))},
    )


def validate_version(
    context: dg.AssetExecutionContext, definition: DatasetDefinition, version: DatasetVersion, control_plane: ControlPlane
) -> ValidationOutcome:
    """Measure and judge a version's records, and store both before any check can block."""
    with control_plane.database.read() as connection:
        baseline = Ancestry(connection, control_plane.database, version).baseline()
    job = validate_job(definition, version, baseline, control_plane)
    result = run_program(context, job, control_plane)
    statistics = read_statistics(result.artifacts["statistics"], control_plane)
    facts = ValidationFacts.model_validate(result.facts)
    verdicts = judge_version(
        facts, statistics, definition.checks, definition.measures, created_at=version.created_at, now=now_ms()
    )
    artifact = result.artifacts["statistics"]
    with output_transaction(control_plane.database, control_plane.store, version, [artifact]) as connection:
        record_artifact(connection, artifact, control_plane.store.manifest(artifact))
        control_plane.validations.set_version(connection, version, artifact, facts, verdicts)
    return ValidationOutcome(statistics, facts, tuple(verdicts))


@contextmanager
def record_problem_on_error(version: DatasetVersion, attempt: str, control_plane: ControlPlane) -> Iterator[None]:
    """Record a failed attempt as a problem of the version, which users see outside Dagster.

    If the version was deleted meanwhile, delete what was derived from it, because that contains its records.
    """
    try:
        yield
    except Exception as problem:
        with control_plane.database.write() as connection:
            is_there = lock_for_derivation(connection, version.id)
            if is_there and isinstance(problem, BadConfiguration | JobFailed):
                record_problem(connection, version, f"could not be {attempt}: {problem}")
        if not is_there:
            derived = [f"{version.storage_path}{folder}" for folder in DERIVED_FOLDERS]
            remove_leftovers(control_plane.database, control_plane.store, version, derived)
        raise


def require_unblocked(
    context: dg.AssetExecutionContext, definition: DatasetDefinition, version: DatasetVersion, control_plane: ControlPlane
) -> None:
    """Raise if a check blocks the version; check it first if it never was.

    Needed when splits are materialized on their own. Checks of earlier splits don't count, because new splits may pass.
    """
    with control_plane.database.read() as connection:
        known = control_plane.validations.find(version.id, connection)
    verdicts = (
        known.verdicts if known is not None else validate_version(context, definition, version, control_plane).verdicts
    )
    if reason := blocking_reason(version.reference, (each for each in verdicts if each.check not in SPLIT_CHECKS)):
        raise dg.Failure(reason, allow_retries=False)


def validate_job(
    definition: DatasetDefinition,
    version: DatasetVersion,
    baseline: tuple[str, Artifact] | None,
    control_plane: ControlPlane,
) -> Job:
    """Return the job that measures a version; its output path depends on contract and baseline."""
    inputs = {"dataset": version.artifact} | ({"reference": baseline[1]} if baseline else {})
    parameters = ValidateParameters(
        contract=definition.contract, measures=definition.measures, reference=baseline[0] if baseline else ""
    ).model_dump(mode="json")
    return make_version_job(Program.VALIDATE, version, inputs, parameters, "statistics", control_plane, definition.resources)


def find_leaks(
    context: dg.AssetExecutionContext,
    definition: DatasetDefinition,
    version: DatasetVersion,
    splits: Mapping[str, Artifact],
    control_plane: ControlPlane,
) -> tuple[Result, Verdict]:
    """Search for the test split in everything that this version or its ancestors train on."""
    with control_plane.database.read() as connection:
        ancestors = Ancestry(connection, control_plane.database, version).training_records()
    named = {OWN_TRAIN_SPLIT: splits["train"]} | {
        name: artifact for name, artifact in ancestors.items() if artifact.digest != splits["train"].digest
    }
    roles = {f"ancestor-{number:03}": name for number, name in enumerate(named)}
    inputs = {"test": splits["test"]} | {role: named[name] for role, name in roles.items()}
    parameters = FindLeaksParameters(near=definition.leak_similarity, names=roles).model_dump(mode="json")
    job = make_version_job(Program.FIND_LEAKS, version, inputs, parameters, "leaks", control_plane, definition.resources)
    result = run_program(context, job, control_plane)
    return result, judge_splits(Leaks.model_validate(result.facts), definition.checks)


def make_version_job(
    program: Program,
    version: DatasetVersion,
    inputs: Mapping[str, Artifact],
    parameters: Mapping[str, object],
    output: str,
    control_plane: ControlPlane,
    hardware: Hardware,
) -> Job:
    """Return a job that stores its output with the version, under an input hash."""
    request = {"parameters": dict(parameters), "inputs": {role: source.digest for role, source in inputs.items()}}
    label = hashlib.sha256(canonical_json(request)).hexdigest()[:12]
    place = f"{version.storage_path}{program}/{label}"
    identifier = f"{program}-{version.id}-{label}".replace("_", "-")
    return Job(
        id=identifier,
        program=program,
        inputs=dict(inputs),
        parameters=dict(parameters),
        outputs={output: f"{place}/{output}"},
        result_uri=f"{place}/result.json",
        store=control_plane.settings.store,
        cache_dir=control_plane.cache_dir,
        hardware=hardware,
    )


def read_statistics(artifact: Artifact, control_plane: ControlPlane) -> Statistics:
    return Statistics.model_validate_json(control_plane.store.get_bytes(f"{artifact.uri}/{STATISTICS_FILE}"))


def quality_metadata(found: ValidationOutcome) -> dict[str, object]:
    """Return the quality metadata of a version for the Dagster UI."""
    seen = found.statistics
    plots = [
        markdown_image("characters", histogram("Characters of a record", seen.characters)),
        markdown_image("words", histogram("Words of a record", seen.words)),
        markdown_image("vocabulary", bar_chart("Most frequent words", seen.vocabulary.top, total=seen.vocabulary.words)),
        markdown_image("languages", bar_chart("Languages", seen.languages)),
    ]
    return {
        "checks": dg.MetadataValue.md(checks_table(found.verdicts)),
        "columns": dg.MetadataValue.md(columns_table(seen)),
        "distributions": dg.MetadataValue.md("\n\n".join(filter(None, plots))),
        "duplicates": seen.duplicates,
        "near_duplicates": seen.near_duplicates or 0,
        "personal_data": dg.MetadataValue.json(seen.personal_data),
        "languages": dg.MetadataValue.json(seen.languages),
        "mean_characters": seen.characters.mean or 0.0,
        "distinct_words": seen.vocabulary.distinct,
        **({"newest_record": dg.MetadataValue.timestamp(seen.newest / 1000)} if seen.newest is not None else {}),
    }


def checks_table(verdicts: Iterable[Verdict]) -> str:
    rows = [
        f"| {verdict.check} | {'passed' if verdict.passed else verdict.severity} | {escape_cell(verdict.sentence)} |"
        for verdict in verdicts
    ]
    return "\n".join(["| check | verdict | why |", "|---|---|---|", *rows])


def columns_table(statistics: Statistics) -> str:
    rows = [
        f"| {escape_cell(name)} | {', '.join(column.kinds)} | {column.filled / max(statistics.records, 1):.1%} |"
        for name, column in statistics.columns.items()
    ]
    return "\n".join(["| column | types | filled |", "|---|---|---|", *rows])


def escape_cell(text: str) -> str:
    """Escape text for a cell of a Markdown table."""
    for letter in "\\|`*_<[":
        text = text.replace(letter, f"\\{letter}")
    return " ".join(text.split())
