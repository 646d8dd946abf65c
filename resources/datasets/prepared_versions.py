"""A preparation that ended becomes a version: of whom it was made, and how, stands in its lineage (specification row C4)."""

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
"""What a version says of its preparation; the result of one that an earlier release ended has not all."""


def output_uris(place: str, *, with_features: bool = False) -> dict[str, str]:
    """Where a preparation leaves what it makes: the splits below the records, which are those of all splits."""
    records = f"{place}{DATASET_SUFFIX}"
    features = {"features": f"{place}/features"} if with_features else {}
    return {
        "dataset": records,
        **{name: f"{records}/{name}" for name in SPLITS},
        "rejected": f"{place}/rejected",
        **features,
    }


def prepared_storage_path(records: str) -> str:
    """The place of a prepared version, whose records lie at a URI."""
    return records.removesuffix(DATASET_SUFFIX) + "/"


def refuse_unknown_columns(parameters: PrepareParameters, parent: DatasetVersion) -> None:
    """Raises 400 for a column that no record has, or a value in: what it decides would be decided for all records alike.

    The class column that nobody named is what records may have: the specification's example names none.
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
    """Raises 400 for what is asked for and would be left undone without a word.

    Not where parameters are read: versions were made with these.
    """
    if parameters.split.column is not None and parameters.split.group_by is not None:
        raise invalid("split.column says each record's split, and split.group_by spreads none then: leave one of them out")
    toxicity = parameters.filter.toxicity
    if toxicity is not None and not toxicity.words and toxicity.detector is None:
        raise invalid("filter.toxicity rejects nothing: give it words, a detector or both, or leave it out")


@dataclass(frozen=True)
class Derivation:
    """What is made: of `parent`, under `name`, with `parameters`, for `user`."""

    parent: DatasetVersion
    name: str
    parameters: PrepareParameters
    user: str


def add_prepared_version(
    database: Database, store: Store, derivation: Derivation, result: Result, job: JobRecord | None = None
) -> tuple[DatasetVersion, bool]:
    """Record the version, its splits, its lineage and the end of its job, in one transaction.

    Returns it, and whether it is new: content that a version of that name has already is that version. Where that one lies
    elsewhere, as other parameters made it, nobody needs what lies here, and it is removed as a version that is deleted is.

    Raises:
        HanzoError: 409 where an earlier version of this preparation is just being deleted, or was while its files were
            written anew, or where the parent was meanwhile: what was made is removed then, as nothing would ever prove it.
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
            # From here on nobody makes a version of it, as one whose files are on their way out: `check_not_being_deleted`.
            claims.claim_for_deletion(connection, leftover, place)
    if is_unused:
        claims.release(store, leftover)
    if version is None and has_parent:
        raise conflict("the same was prepared before, and was deleted just now: ask for it again")
    if version is None:
        raise conflict(f"dataset {parent.reference} was deleted while it was prepared: prepare a version that is there")
    return version, is_new


def read_manifests(store: Store, result: Result) -> dict[str, Manifest]:
    """The manifests of what was made, but for those that are gone."""
    found = {}
    for role, made in result.artifacts.items():
        with suppress(BrokenArtifact):
            found[role] = store.manifest(made)
    return found


def is_complete(store: Store, place: str, result: Result, manifests: Mapping[str, Manifest]) -> bool:
    """Whether all is there that was made.

    An equal version may have been there as this preparation began, or found its files done, and been deleted since.
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
    """What was made, under the next number of its name."""
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
    """Records are cleaned, filtered and masked: their columns stay, but a card number that was stored as a number is a text
    now, and a column that was filled, or required, is always there; and so are features that were asked for.
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
    """The types of a column in which values of another one stand now too."""
    known, question, _ = kinds.partition("?")
    return "|".join(sorted({*filter(None, known.split("|")), another})) + question


def split_row(artifact: Artifact, num_records: int) -> dict[str, object]:
    """A split as a version's row has it."""
    return {
        "path": artifact.uri + "/",
        "num_records": num_records,
        "size_bytes": artifact.size_bytes,
        "artifact": artifact.model_dump(),
    }
