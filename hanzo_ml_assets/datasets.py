"""The assets of a dataset: source, version and splits."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import dagster as dg
from pydantic import JsonValue

from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.dataset_checks import (
    SPLITS_FOLDER,
    find_leaks,
    make_check_specs,
    quality_metadata,
    record_problem_on_error,
    require_unblocked,
    to_check_result,
    validate_version,
)
from hanzo_ml_assets.definition_schema import DatasetDefinition
from hanzo_ml_assets.failure_reason import reports_exit_reason
from hanzo_ml_assets.preparation import build_prepared
from hanzo_ml_assets.run_tags import asset_group_name, find_pinned_version
from hanzo_ml_assets.supervisor import SUPERVISOR_HOOKS, run_program
from recipes.contracts.job import Job, Program, Result
from recipes.contracts.rendering import CURRENT_RENDERING, Rendering
from recipes.contracts.validation_results import Leaks
from recipes.records.record_layouts import has_asked_context
from recipes.storage.manifest import Artifact, canonical_json
from resources.datasets.check_verdicts import Verdict
from resources.datasets.deletion import output_transaction
from resources.ingest.formats import parse_format
from resources.ingest.new_version import NewVersion
from resources.ingest.remote_sources import is_address, list_files, query_source
from resources.ingest.source_files import SourceFile, local_files
from resources.ingest.version_creation import create_from_files
from resources.lineage.edges import record_artifact
from resources.metadata.datasets import DatasetVersion
from resources.metadata.tracking.experiments import DEFAULT_ORGANIZATION
from resources.settings.settings import Settings

SPLITS = ("train", "validation", "test")
SPLIT_FORM = "lines of the version"
"""Format of a split; part of the hash that names its path."""
WHOLE_QUESTION_FORM = "lines of the version, by all that is asked"
"""The same for records whose system message and input are part of the question."""


@dataclass(frozen=True)
class DatasetSplits:
    """A version's splits, their record counts, and how many held-out questions leak into training."""

    artifacts: Mapping[str, Artifact]
    records: Mapping[str, int]
    leaked: JsonValue


def build_dataset_assets(definition: DatasetDefinition, folder: Path) -> list[dg.AssetsDefinition | dg.AssetSpec]:
    """Return all assets of a dataset definition stored in `folder`."""
    prefix = ["datasets", definition.name]
    group = asset_group_name("datasets", definition.name)
    owners = list(definition.owners)
    source = dg.AssetSpec(
        [*prefix, "source"],
        group_name=group,
        kinds={"file", definition.format} if definition.sql is None else {"sql"},
        owners=owners,
        description=f"{describe_origin(definition)}. {definition.description}",
    )

    @dg.asset(
        key=[*prefix, "version"],
        deps=[source],
        group_name=group,
        kinds={definition.format},
        owners=owners,
        description="An immutable version: equal content never creates a second one. Its data version is the content hash.",
        check_specs=make_check_specs(definition.checks, [*prefix, "version"], for_splits=False),
        hooks=SUPERVISOR_HOOKS,
        code_version="2",
    )
    @reports_exit_reason
    def version(context: dg.AssetExecutionContext, control_plane: ControlPlane) -> dg.MaterializeResult:
        found = find_pinned_version(context, control_plane)
        if found is None and definition.source is None and definition.sql is None:
            raise dg.Failure(f"upload files: `hanzo-ml dataset create --name NAME --path FILE`; {definition.name} has none")
        if found is None:
            wanted = NewVersion(definition.name, definition.format, "dagster", DEFAULT_ORGANIZATION)
            files = list_raw_files(definition, folder, control_plane.settings)
            found, _ = create_from_files(control_plane.database, control_plane.store, wanted, files)
        with record_problem_on_error(found, "checked", control_plane):
            checked = validate_version(context, definition, found, control_plane)
        return dg.MaterializeResult(
            metadata={**version_metadata(found), **quality_metadata(checked)},
            data_version=dg.DataVersion(found.content_sha256),
            check_results=[to_check_result(verdict, [*prefix, "version"]) for verdict in checked.verdicts],
        )

    @dg.multi_asset(
        name=f"split_{group}",
        specs=[
            dg.AssetSpec(
                [*prefix, split],
                deps=[[*prefix, "version"]],
                group_name=group,
                kinds={"jsonl"},
                owners=owners,
                description=f"The {split} split, deterministic for version and seed; prepared versions have their own.",
                code_version="1",
            )
            for split in SPLITS
        ],
        check_specs=[
            dg.AssetCheckSpec(
                "no_leak",
                asset=[*prefix, "test"],
                description="No question of the held-out splits occurs in the training split.",
            ),
            *make_check_specs(definition.checks, [*prefix, "test"], for_splits=True),
        ],
        hooks=SUPERVISOR_HOOKS,
    )
    @reports_exit_reason
    def splits(
        context: dg.AssetExecutionContext, control_plane: ControlPlane
    ) -> Iterator[dg.MaterializeResult | dg.AssetCheckResult]:
        found = find_pinned_version(context, control_plane)
        if found is None:
            found = control_plane.datasets.read(definition.name, DEFAULT_ORGANIZATION)
        with record_problem_on_error(found, "split", control_plane):
            require_unblocked(context, definition, found, control_plane)
            if found.is_prepared:
                divided = read_prepared_splits(found, control_plane)
            else:
                job = split_job(definition, found, control_plane)
                divided = read_split_result(run_program(context, job, control_plane))
            leaks, verdict = find_leaks(context, definition, found, divided.artifacts, control_plane)
        record_splits(control_plane, found, divided, leaks, verdict)
        for split in SPLITS:
            artifact = divided.artifacts[split]
            yield dg.MaterializeResult(
                asset_key=[*prefix, split],
                metadata={
                    "dagster/row_count": divided.records[split],
                    "dataset_version": found.reference,
                    "uri": artifact.uri,
                    "digest": artifact.digest,
                },
                data_version=dg.DataVersion(artifact.digest),
            )
        yield dg.AssetCheckResult(
            check_name="no_leak",
            asset_key=[*prefix, "test"],
            passed=divided.leaked == 0,
            metadata={"leaked_records": str(divided.leaked)},
        )
        yield to_check_result(verdict, [*prefix, "test"])

    return [source, version, splits, build_prepared(definition)]


def describe_origin(definition: DatasetDefinition) -> str:
    if definition.sql is not None:
        return f"Rows of database {definition.database}: {definition.sql}"
    return f"Raw files: {definition.source or 'uploaded'}"


def list_raw_files(definition: DatasetDefinition, folder: Path, settings: Settings) -> list[SourceFile]:
    """List the files or the query of a definition's `source` or `sql`.

    Its author runs this server, so every address and every database named in the settings is allowed.
    """
    source, format = str(definition.source), parse_format(definition.format)
    if definition.sql is not None and definition.database is not None:
        return [query_source(settings, definition.database, definition.sql, format)]
    return list_files(settings, source, format) if is_address(source) else local_files((folder / source).resolve(), format)


def version_metadata(version: DatasetVersion) -> dict[str, object]:
    return {
        "dagster/row_count": version.num_records,
        "version": version.version,
        "size_bytes": version.size_bytes,
        "uri": version.storage_path,
        "content_sha256": version.content_sha256,
        **{key: dg.MetadataValue.json(version.lineage[key]) for key in ("skipped", "unread") if key in version.lineage},
        "dagster/column_schema": dg.TableSchema([dg.TableColumn(name, kind) for name, kind in version.schema.items()]),
    }


def split_job(definition: DatasetDefinition, version: DatasetVersion, control_plane: ControlPlane) -> Job:
    """Return the job that splits a version; its output path depends on its parameters.

    Splits that a run was trained on therefore never change. The format is part of the path too: splits that older releases
    made as copies, or by instruction alone, keep their own.
    """
    parameters = definition.split.model_dump(mode="json")
    form, rendering = SPLIT_FORM, Rendering.AS_STORED
    if has_asked_context(version.schema):
        form, rendering = WHOLE_QUESTION_FORM, CURRENT_RENDERING
    label = hashlib.sha256(canonical_json([form, parameters])).hexdigest()[:12]
    place = f"{version.storage_path}{SPLITS_FOLDER}/{label}"
    identifier = f"split-{version.id}-{label}"
    return Job(
        id=identifier,
        program=Program.SPLIT,
        inputs={"dataset": version.artifact},
        parameters=parameters,
        outputs={split: f"{place}/{split}" for split in SPLITS},
        result_uri=f"{place}/result.json",
        store=control_plane.settings.store,
        cache_dir=control_plane.cache_dir,
        hardware=definition.resources,
        rendering=rendering,
    )


def read_split_result(result: Result) -> DatasetSplits:
    """Return the splits that the program `split` made."""
    records = {split: int(result.metrics[split]) for split in SPLITS}
    return DatasetSplits({split: result.artifacts[split] for split in SPLITS}, records, result.facts["leaked"])


def read_prepared_splits(version: DatasetVersion, control_plane: ControlPlane) -> DatasetSplits:
    """Return the splits that a prepared version was made with; others were not tokenized."""
    artifacts = {split: version.split(split) for split in SPLITS}
    leaked = control_plane.store.manifest(artifacts["test"]).facts["leaked"]
    return DatasetSplits(artifacts, {split: version.splits[split]["num_records"] for split in SPLITS}, leaked)


def record_splits(
    control_plane: ControlPlane, version: DatasetVersion, divided: DatasetSplits, leaks: Result, verdict: Verdict
) -> None:
    """Record lineage, pointers and leaks in one transaction, so no job starts before."""
    made = [*divided.artifacts.values(), *leaks.artifacts.values()]
    with output_transaction(control_plane.database, control_plane.store, version, made) as connection:
        control_plane.validations.set_leaks(connection, version, Leaks.model_validate(leaks.facts), verdict)
        for artifact in made:
            record_artifact(connection, artifact, control_plane.store.manifest(artifact))
        stored = {
            split: {
                "path": artifact.uri + "/",
                "num_records": divided.records[split],
                "size_bytes": artifact.size_bytes,
                "artifact": artifact.model_dump(),
            }
            for split, artifact in divided.artifacts.items()
        }
        control_plane.datasets.set_splits(connection, version, stored)
