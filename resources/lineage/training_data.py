"""Describe what data a model was trained on, and whether it included personal data.

The result has the splits that the version's runs used, their dataset versions, and what those were made from, as recorded in
lineage. Personal data is only known if preparation or validation searched for it.
"""

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

from pydantic import BaseModel
from sqlalchemy import Connection

from recipes.storage import uris
from recipes.storage.artifact_store import BrokenArtifact, Store
from recipes.storage.manifest import Artifact
from resources.lineage.data_reach import REPORT_KIND, model_digests
from resources.lineage.edges import child_edges, find_artifact, parent_digests
from resources.lineage.run_record import LINEAGE_ROLES, mlflow_digest
from resources.metadata.database import Database
from resources.metadata.datasets import Datasets, DatasetVersion
from resources.metadata.registry.model_versions import ModelVersion
from resources.metadata.tracking.run_inputs import load_inputs

STATISTICS = "statistics"
"""The kind of the artifact in which a validation stores statistics, and the name of its file."""


class Included(StrEnum):
    """Whether a model's training data included personal data."""

    FOUND = "yes"
    NOT_FOUND = "none was found"
    MASKED = "masked before training"
    NOT_EXAMINED = "not examined"


class PersonalData(BaseModel):
    """What is known about personal data in a version, counted by kind.

    None means that it was not examined.
    """

    included: Included
    found: dict[str, int] | None = None
    masked: dict[str, int] | None = None


class DataUse(BaseModel):
    """A dataset version with which a model was made.

    `splits` has the number of records for each role in which it was used. `records` and `transform` are the version's own;
    `made_of` names its parent versions.
    """

    dataset: str
    id: str
    digest: str
    records: int
    splits: dict[str, int | None]
    transform: object
    made_of: list[str]
    personal_data: PersonalData


class LoggedDataset(BaseModel):
    """A dataset that a run's own code logged; it was not verified."""

    name: str
    digest: str
    source: str


class TrainingData(BaseModel):
    """All data behind a model version. The training data of `base_models` is unknown."""

    name: str
    version: int
    personal_data: Included
    datasets: list[DataUse]
    base_models: list[str]
    logged: list[LoggedDataset]


@dataclass(frozen=True)
class ModelAncestors:
    """The ancestors of a model by digest, and the roles in which each was used."""

    artifacts: Mapping[str, Artifact]
    roles: Mapping[str, Collection[str]]


def describe_training_data(database: Database, store: Store, version: ModelVersion, organization: str) -> TrainingData:
    """Describe what a version was trained, validated and tested on.

    Includes the data of the models on which it is based.
    """
    known = Datasets(database).list(organization)
    with database.read() as connection:
        model_ancestors = collect_ancestors(connection, store, version)
        runs = {uris.parse_run_id(artifact.uri) for artifact in model_ancestors.artifacts.values()} | {version.run_id}
        logged = [each.dataset for found in load_inputs(connection, sorted(filter(None, runs))).values() for each in found]
        used = find_used_splits(connection, model_ancestors, known)
        versions = [each for each in known if each.id in used or each.artifact.digest in model_ancestors.artifacts]
        known_as = {(each.name, mlflow_digest(each)) for each in versions}
        looked_at = {each.id: find_statistics(connection, each) for each in versions}
    uses = [
        DataUse(
            dataset=each.reference,
            id=each.id,
            digest=each.artifact.digest,
            records=each.num_records,
            splits={role: count_split_records(store, split) for role, split in sorted(used.get(each.id, {}).items())},
            transform=each.lineage["transform"],
            made_of=list(each.lineage["parent_datasets"]),
            personal_data=examine_personal_data(store, each, looked_at[each.id]),
        )
        for each in versions
    ]
    return TrainingData(
        name=version.name,
        version=version.version,
        personal_data=combine_answers([use.personal_data.included for use in uses if use.splits]),
        datasets=sorted(uses, key=lambda use: (not use.splits, use.dataset)),
        base_models=sorted(artifact.uri for artifact in model_ancestors.artifacts.values() if artifact.kind == "base"),
        logged=[
            LoggedDataset(name=each.name, digest=each.digest, source=each.source)
            for each in logged
            if (each.name, each.digest) not in known_as  # a command's input, which is among the datasets
        ],
    )


def collect_ancestors(connection: Connection, store: Store, version: ModelVersion) -> ModelAncestors:
    """Return the ancestors of a version's files, and its run's test split."""
    begin = set(model_digests(version))
    if version.run_id is not None and (record := store.find(uris.run_record(version.run_id))):
        begin.add(record.digest)
    artifacts: dict[str, Artifact] = {}
    roles: dict[str, set[str]] = defaultdict(set)
    reports = [edge.child for edge in child_edges(connection, begin) if edge.child.kind == REPORT_KIND]
    for report in reports:
        # Only the test data: a report also names the model of the comparison.
        test = parent_digests(connection, report.digest).get("test")
        if test is not None and uris.parse_run_id(report.uri) == version.run_id:
            roles[test].add("test")
    level = begin | set(roles)
    while level:
        found = [artifact for digest in sorted(level) if (artifact := find_artifact(connection, digest))]
        artifacts |= {artifact.digest: artifact for artifact in found}
        above = set()
        for artifact in found:
            for role, digest in parent_digests(connection, artifact.digest).items():
                roles[digest].add(role)
                above.add(digest)
        level = above - set(artifacts)
    return ModelAncestors(artifacts, roles)


def find_used_splits(
    connection: Connection, model_ancestors: ModelAncestors, versions: Iterable[DatasetVersion]
) -> Mapping[str, Mapping[str, Artifact]]:
    """Return the artifact used in each role, for each dataset version's id.

    The artifact is a split or the whole version.
    """
    versions = list(versions)
    owners = {split["artifact"]["digest"]: each for each in versions for split in each.splits.values()}
    by_artifact = {each.artifact.digest: each for each in versions}
    used: dict[str, dict[str, Artifact]] = defaultdict(dict)
    for digest, artifact in model_ancestors.artifacts.items():
        if artifact.kind == "split":
            # If the version was split again since, the old split still belongs to the version from which it was made.
            owner = owners.get(digest) or by_artifact.get(parent_digests(connection, digest).get("dataset", ""))
            used_as = model_ancestors.roles[digest]
        else:  # a command reads a whole version
            owner, used_as = (
                by_artifact.get(digest),
                [role for role in model_ancestors.roles[digest] if role in LINEAGE_ROLES.values()],
            )
        if owner is not None and used_as:
            used[owner.id] |= dict.fromkeys(used_as, artifact)
    return used


def count_split_records(store: Store, split: Artifact) -> int | None:
    """Return a split's number of records; None if its manifest cannot be read."""
    try:
        count = store.manifest(split).facts.get("num_records")
    except BrokenArtifact:
        return None
    return count if isinstance(count, int) else None


def find_statistics(connection: Connection, version: DatasetVersion) -> Artifact | None:
    """Return the statistics of a version's newest validation, or None."""
    found = [edge.child for edge in child_edges(connection, [version.artifact.digest]) if edge.child.kind == STATISTICS]
    return found[-1] if found else None


def examine_personal_data(store: Store, version: DatasetVersion, statistics: Artifact | None) -> PersonalData:
    """Return the personal data that was found in a version, or masked in it."""
    found = masked = None
    if statistics is not None:
        found = parse_counts(json.loads(store.get_bytes(f"{statistics.uri}/{STATISTICS}.json")).get("personal_data"))
    with suppress(BrokenArtifact):
        masked = parse_counts(store.manifest(version.artifact).facts.get("masked"))
    if found:
        included = Included.FOUND
    elif masked:
        included = Included.MASKED
    else:
        included = Included.NOT_EXAMINED if found is None and masked is None else Included.NOT_FOUND
    return PersonalData(included=included, found=found, masked=masked)


def parse_counts(value: object) -> dict[str, int] | None:
    """Return the counts by kind, without zeros; None if nothing was counted."""
    return {str(kind): int(count) for kind, count in value.items() if count} if isinstance(value, Mapping) else None


def combine_answers(answers: Collection[Included]) -> Included:
    """Combine the answers for several versions: "found" takes precedence, then "not examined"."""
    order = (Included.FOUND, Included.NOT_EXAMINED, Included.MASKED, Included.NOT_FOUND)
    return next((answer for answer in order if answer in answers), Included.NOT_EXAMINED)
