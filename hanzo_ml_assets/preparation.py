"""The asset `prepared`: a version derived from another by the program `prepare`."""

import hashlib
from collections.abc import Mapping

import dagster as dg

from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.definition_schema import DatasetDefinition, Preparation
from hanzo_ml_assets.failure_reason import make_failure, reports_exit_reason
from hanzo_ml_assets.run_tags import asset_group_name, find_pinned_version
from hanzo_ml_assets.supervisor import SUPERVISOR_HOOKS, run_program
from recipes.contracts.job import BadConfiguration, Job, Program
from recipes.contracts.parameters import PrepareParameters
from recipes.contracts.tokenizer_reference import describe_reference
from recipes.records.record_layouts import depends_on_rendering
from recipes.storage.manifest import canonical_json
from resources.compute.base import JobFailed
from resources.datasets.prepared_versions import (
    SPLITS,
    Derivation,
    add_prepared_version,
    output_uris,
    prepared_storage_path,
    refuse_ineffective_settings,
    refuse_unknown_columns,
)
from resources.errors import HanzoError
from resources.metadata.datasets import DatasetVersion, dataset_folder
from resources.metadata.jobs import JobRecord
from resources.metadata.tracking.experiments import DEFAULT_ORGANIZATION
from resources.object_store.chunk_claims import ChunkClaims

PREPARATION_FORM = "rendered as the engine is sent it"
"""How records are read and rendered; part of the hash that names a version's path, so older versions keep theirs."""
PREPARATION_TAG = "hanzo_ml/preparation"
"""Run tag with the id of the job that requested a preparation."""


def build_prepared(definition: DatasetDefinition) -> dg.AssetsDefinition:
    prefix = ["datasets", definition.name]

    @dg.asset(
        key=[*prefix, "prepared"],
        deps=[[*prefix, "version"]],
        group_name=asset_group_name("datasets", definition.name),
        kinds={"arrow"},
        owners=list(definition.owners),
        description="A new version derived by the definition's section `prepare:` or by a submitted preparation.",
        hooks=SUPERVISOR_HOOKS,
        code_version="1",
    )
    @reports_exit_reason
    def prepared(context: dg.AssetExecutionContext, control_plane: ControlPlane) -> dg.MaterializeResult:
        job_id = context.run.tags.get(PREPARATION_TAG)
        asked = control_plane.jobs.start(job_id) if job_id else None
        try:
            derivation = resolve_derivation(context, definition, asked, control_plane)
            job = preparation_job(derivation, asked, control_plane, definition.preparation)
            end_deletion(derivation, job, control_plane)
            result = run_program(context, job, control_plane)
            version, is_new = add_prepared_version(control_plane.database, control_plane.store, derivation, result, asked)
        except (BadConfiguration, JobFailed, HanzoError) as error:
            if isinstance(error, JobFailed) and error.reason.is_infrastructure:
                raise  # the sensor retry_dead_runs retries it, and fails the job after the last retry
            if asked is not None:
                control_plane.jobs.fail(asked.id, str(error))
            raise make_failure(error, allow_retries=False) from None
        return dg.MaterializeResult(
            metadata={
                "dagster/row_count": version.num_records,
                "version": version.reference,
                "new": is_new,
                "parent": derivation.parent.reference,
                "uri": version.storage_path,
                **{name: int(result.metrics[name]) for name in SPLITS},
                **{name: dg.MetadataValue.json(result.facts[name]) for name in ("rejected", "masked", "oversampled")},
                "truncated": version.metadata.get("truncated"),
            },
            data_version=dg.DataVersion(version.content_sha256),
        )

    return prepared


def end_deletion(derivation: Derivation, job: Job, control_plane: ControlPlane) -> None:
    """Complete an interrupted deletion of an equal preparation, whose files are not reused."""
    organization = derivation.parent.organization
    claims = ChunkClaims(control_plane.database, organization, dataset_folder(organization, derivation.name))
    claims.finish_deletion(control_plane.store, prepared_storage_path(job.outputs["dataset"]))


def resolve_derivation(
    context: dg.AssetExecutionContext, definition: DatasetDefinition, asked: JobRecord | None, control_plane: ControlPlane
) -> Derivation:
    """Resolve parent and parameters from the job, else from the definition's section.

    Raises:
        BadConfiguration: there is neither.
        HanzoError: the section names a column that no record has, or a setting without effect.
    """
    if asked is not None:
        parent = control_plane.datasets.read(str(asked.config["dataset"]), asked.organization)
        parameters = PrepareParameters.model_validate(asked.config["parameters"])
        return Derivation(parent, str(asked.config["name"]), parameters, asked.user_id)
    if definition.prepare is None:
        raise BadConfiguration(f"add a section `prepare:` to the definition of {definition.name}, or submit a preparation")
    parent = find_pinned_version(context, control_plane) or newest_source_version(definition, control_plane)
    refuse_ineffective_settings(definition.prepare)
    refuse_unknown_columns(definition.prepare, parent)
    return Derivation(parent, parent.name, definition.prepare, "dagster")


def newest_source_version(definition: DatasetDefinition, control_plane: ControlPlane) -> DatasetVersion:
    """Return the newest version that was not derived from another."""
    versions = control_plane.datasets.list(DEFAULT_ORGANIZATION, definition.name)
    found = [version for version in versions if not version.lineage["parent_datasets"]]
    if not found:
        raise BadConfiguration(f"dataset {definition.name} has no version yet: materialize its asset `version`")
    return max(found, key=lambda version: version.version)


def preparation_job(
    derivation: Derivation,
    asked: JobRecord | None,
    control_plane: ControlPlane,
    usual: Preparation,
) -> Job:
    """Return the job that prepares a version; a version's files never change.

    Its output path therefore depends on the parameters, on the tokenizer's content, and on how records are read and rendered
    wherever that makes a difference.
    """
    parent, tokenize = derivation.parent, derivation.parameters.tokenize
    parameters: Mapping[str, object] = derivation.parameters.model_dump(mode="json")
    asks = parameters if tokenize is None else {**parameters, **describe_reference(tokenize.tokenizer)}
    form = [PREPARATION_FORM, asks] if depends_on_rendering(parent.schema) else asks
    label = hashlib.sha256(canonical_json(form)).hexdigest()[:12]
    place = f"{dataset_folder(parent.organization, derivation.name)}/prepared-{parent.name}-{parent.version}-{label}"
    identifier = f"prepare-{parent.id}-{label}"
    config = asked.config if asked is not None else {}
    return Job(
        id=asked.id if asked is not None else identifier,
        program=Program.PREPARE,
        inputs={"dataset": parent.artifact},
        parameters=dict(parameters),  # type: ignore[arg-type]  # what pydantic dumps as JSON is JSON
        outputs=output_uris(place, with_features=derivation.parameters.features is not None),
        result_uri=f"{place}/result.json",
        store=control_plane.settings.store,
        cache_dir=control_plane.cache_dir,
        hardware=usual.resources.model_copy(update={"cpu": config["workers"]} if "workers" in config else {}),
        pods=int(config.get("pods", usual.workers)),
    )
