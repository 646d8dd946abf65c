"""Record a finished preparation as a dataset version, with its lineage."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from pydantic import JsonValue
from sqlalchemy import Connection

from recipes.contracts.job import Result
from recipes.contracts.parameters import CleanParameters, PrepareParameters
from recipes.records.features import FEATURES_COLUMN
from recipes.storage.artifact_store import BrokenArtifact, Store
from recipes.storage.manifest import Artifact, Manifest
from resources.errors import conflict, invalid
from resources.ingest.column_schema import TYPE_NAMES
from resources.lineage.edges import record_artifact
from resources.metadata.database import Database
from resources.metadata.datasets import Datasets, DatasetVersion, dataset_folder, lock_for_derivation, new_id
from resources.metadata.jobs import JobRecord, Jobs
from resources.metadata.outbox import now_ms
from resources.object_store.chunk_claims import ChunkClaims

SPLITS = ("train", "validation", "test")
DATASET_SUFFIX = "/all/records"
MAX_SHOWN_COLUMNS = 20
REPORTED_FACTS = ("rejected", "masked", "oversampled", "leaked", "truncated", "retyped", "filled", "unread")
"""Facts of a preparation that are stored with the version; results of earlier releases may lack some."""


def output_uris(place: str, *, with_features: bool = False) -> dict[str, str]:
    """Return the URIs of a preparation's outputs.

    Splits are below the records, which contain all splits.
    """
    records = f"{place}{DATASET_SUFFIX}"
    features = {"features": f"{place}/features"} if with_features else {}
    return {
        "dataset": records,
        **{name: f"{records}/{name}" for name in SPLITS},
        "rejected": f"{place}/rejected",
        **features,
    }


def prepared_storage_path(records: str) -> str:
    """Return the storage path of a prepared version, from the URI of its records."""
    return records.removesuffix(DATASET_SUFFIX) + "/"


def refuse_unknown_columns(parameters: PrepareParameters, parent: DatasetVersion) -> None:
    """Refuse a column that no record has, or that is always null.

    A setting with such a column would treat all records alike.

    The default class column is not checked, because records need not have one.
    """
    named = [("split.group_by", parameters.split.group_by), ("split.column", parameters.split.column)]
    if parameters.clean is not None:
        named += parameters.clean.columns
    if parameters.features is not None:
        named += parameters.features.named_columns
        if FEATURES_COLUMN in parent.schema:
            raise invalid(
                f"dataset {parent.reference} has a column '{FEATURES_COLUMN}': prepare the version that it was made of"
            )
    if parameters.augment.oversample_minority and "class_column" in parameters.augment.model_fields_set:
        named.append(("augment.class_column", parameters.augment.class_column))
    for setting, column in named:
        if column is not None and column not in parent.schema:
            existing = ", ".join(list(parent.schema)[:MAX_SHOWN_COLUMNS])
            more = f" and {len(parent.schema) - MAX_SHOWN_COLUMNS} more" if len(parent.schema) > MAX_SHOWN_COLUMNS else ""
            raise invalid(
                f"no record of dataset {parent.reference} has the column '{column[:100]}' of {setting}: it has "
                f"{existing}{more}"
            )
        if column is not None and parent.schema[column].rstrip("?") == "null":
            raise invalid(f"the column '{column[:100]}' of {setting} is null in all records of dataset {parent.reference}")


def refuse_ineffective_settings(parameters: PrepareParameters) -> None:
    """Refuse settings that would have no effect. Raises HanzoError: 400.

    This is not checked when parameters are read, because existing versions were made with them.
    """
    if parameters.split.column is not None and parameters.split.group_by is not None:
        raise invalid("split.column assigns each record's split, so that split.group_by has no effect: remove one of them")
    toxicity = parameters.filter.toxicity
    if toxicity is not None and not toxicity.words and toxicity.detector is None:
        raise invalid("filter.toxicity rejects nothing: set words, a detector or both, or remove it")


@dataclass(frozen=True)
class Derivation:
    """A preparation: from `parent` to a version of `name`, with `parameters`, for `user`."""

    parent: DatasetVersion
    name: str
    parameters: PrepareParameters
    user: str


def add_prepared_version(
    database: Database, store: Store, derivation: Derivation, result: Result, job: JobRecord | None = None
) -> tuple[DatasetVersion, bool]:
    """Record the version, its splits, its lineage and its job's end in one transaction.

    Returns the version, and whether it is new: if a version of that name has equal content, that version is returned. If it
    is stored elsewhere, because it was made with other parameters, the new files are removed like those of a deleted
    version.

    Raises:
        HanzoError: 409 if an earlier version of this preparation is being deleted, or was deleted while its files were
            rewritten, or if the parent was deleted meanwhile. The new files are then removed, as no lineage could prove
            them.
    """
    parent, place = derivation.parent, prepared_storage_path(result.artifacts["dataset"].uri)
    claims = ChunkClaims(database, parent.organization, dataset_folder(parent.organization, derivation.name))
    manifests = read_manifests(store, result)
    leftover, is_new = new_id(), False
    with database.write() as connection:
        version = Datasets(database).find_by_content(connection, parent.organization, derivation.name, content_hash(result))
        has_parent = lock_for_derivation(connection, parent.id)
        if version is None and has_parent:
            claims.check_not_being_deleted(connection, place)
            if is_new := is_complete(store, place, result, manifests):
                version = build_version(derivation, result, Datasets(database), connection)
                for role, made in result.artifacts.items():
                    record_artifact(connection, made, manifests[role])
                Datasets(database).add(connection, version)
        if version is not None and job is not None:
            existing = {"dataset": version.artifact, **{split: version.split(split) for split in SPLITS}}
            artifacts = result.artifacts if version.storage_path == place else existing
            Jobs(database).complete(connection, job.id, artifacts, 0.0)
        if is_unused := version is None or version.storage_path != place:
            # From here on, no version can be created at this place, since its files are being deleted:
            # `check_not_being_deleted`.
            claims.claim_for_deletion(connection, leftover, place)
    if is_unused:
        claims.release(store, leftover)
    if version is None and has_parent:
        raise conflict("an earlier version with the same contents was just deleted: try again")
    if version is None:
        raise conflict(f"dataset {parent.reference} was deleted while it was prepared: prepare an existing version")
    return version, is_new


def read_manifests(store: Store, result: Result) -> dict[str, Manifest]:
    """Return the manifests of the outputs, without missing ones."""
    found = {}
    for role, made in result.artifacts.items():
        with suppress(BrokenArtifact):
            found[role] = store.manifest(made)
    return found


def is_complete(store: Store, place: str, result: Result, manifests: Mapping[str, Manifest]) -> bool:
    """Return whether all outputs exist.

    An equal version may have existed when this preparation began, so that its files were reused, and been deleted since.
    """
    existing = {entry.uri: entry.size for entry in store.entries(place)}
    return manifests.keys() == result.artifacts.keys() and all(
        existing.get(f"{made.uri}/{file.path}") == file.size
        for role, made in result.artifacts.items()
        for file in manifests[role].files
    )


def content_hash(result: Result) -> str:
    return str(result.facts["content_sha256"])


def build_version(derivation: Derivation, result: Result, datasets: Datasets, connection: Connection) -> DatasetVersion:
    """Build the new version, with the next number of its name."""
    parent, artifact = derivation.parent, result.artifacts["dataset"]
    return DatasetVersion(
        id=new_id(),
        name=derivation.name,
        version=datasets.reserve_number(connection, parent.organization, derivation.name),
        organization=parent.organization,
        created_at=now_ms(),
        created_by=derivation.user,
        storage_path=prepared_storage_path(artifact.uri),
        format="arrow" if derivation.parameters.tokenize else "jsonl",
        size_bytes=artifact.size_bytes,
        num_records=sum(int(result.metrics[name]) for name in SPLITS),
        schema=prepared_schema(parent.schema, derivation.parameters, result.facts),
        splits={name: split_row(result.artifacts[name], int(result.metrics[name])) for name in SPLITS},
        metadata={name: result.facts[name] for name in REPORTED_FACTS if name in result.facts},
        tags=[],
        lineage={
            "parent_datasets": [parent.reference],
            "transform": derivation.parameters.model_dump(mode="json", exclude_none=True),
        },
        content_sha256=content_hash(result),
        artifact=artifact,
    )


def prepared_schema(
    schema: Mapping[str, str], parameters: PrepareParameters, facts: Mapping[str, JsonValue]
) -> dict[str, str]:
    """Return the schema after preparation.

    Cleaning, filtering and masking keep the columns. But a masked number (such as a card number) becomes text, a column that
    was filled or required is always present, and features are a column too.
    """
    made = dict(schema)
    clean = parameters.clean or CleanParameters()
    retyped, filled = facts.get("retyped"), facts.get("filled")
    for column in filled if isinstance(filled, dict) else ():
        made[column] = add_column_type(made[column], TYPE_NAMES[type(clean.fill[column])])
    for required_column in [*clean.fill, *clean.required]:
        kinds = made[required_column].removesuffix("?").split("|")
        made[required_column] = "|".join(kind for kind in kinds if kind != "null")
    for masked in retyped if isinstance(retyped, list) else ():
        made[str(masked)] = add_column_type(made[str(masked)], "string")
    return made if parameters.features is None else {**made, FEATURES_COLUMN: TYPE_NAMES[dict]}


def add_column_type(kinds: str, another: str) -> str:
    """Add a type to the types of a column."""
    known, question, _ = kinds.partition("?")
    return "|".join(sorted({*filter(None, known.split("|")), another})) + question


def split_row(artifact: Artifact, num_records: int) -> dict[str, object]:
    """Return a split in the form of a version's row."""
    return {
        "path": artifact.uri + "/",
        "num_records": num_records,
        "size_bytes": artifact.size_bytes,
        "artifact": artifact.model_dump(),
    }
