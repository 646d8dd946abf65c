"""Find the organization that owns an object, a stored file or an event."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from sqlalchemy import Column, ColumnElement, Connection, FromClause, and_, exists, or_, select

from recipes.contracts.frozen_model import UNSTORABLE_CHARACTERS
from recipes.contracts.job import Job
from recipes.storage import uris
from resources.metadata.audit_log import AUDIT_TOPIC as AUDIT
from resources.metadata.database import Database
from resources.metadata.field_rules import MAX_INT64
from resources.metadata.gpu_usage import owner_id
from resources.metadata.job_record import PROGRAMS
from resources.metadata.outbox import Event
from resources.metadata.registry.model_names import folder_organization
from resources.metadata.tables import (
    dataset_versions,
    events,
    experiments,
    jobs,
    logged_models,
    registered_models,
    runs,
    sweeps,
)
from resources.metadata.tracking.experiments import DEFAULT_ORGANIZATION

# The organization that owns an object: the only look-up behind every refusal of access to another organization's objects.


class ObjectKind(StrEnum):
    EXPERIMENT = "experiment"
    RUN = "run"
    LOGGED_MODEL = "logged model"
    REGISTERED_MODEL = "registered model"
    DATASET = "dataset"
    JOB = "job"
    SWEEP = "sweep"
    ORGANIZATION = "organization"


@dataclass(frozen=True, order=True)
class Reference:
    """An object as named by a request."""

    kind: ObjectKind
    id: str

    def __str__(self) -> str:
        """Return a text that can be stored, even for an impossible name.

        A U+0000 in the audit log makes PostgreSQL unable to read any field of the row.
        """
        name = UNSTORABLE_CHARACTERS.sub("\ufffd", self.id[:100])
        return f"{self.kind}:{name}"


@dataclass(frozen=True)
class Owner:
    """The owner of an object; `user_id` is empty for kinds where its creator is irrelevant."""

    organization: str
    user_id: str = ""


ID_COLUMNS: Mapping[ObjectKind, Column[str]] = {
    ObjectKind.EXPERIMENT: experiments.c.id,
    ObjectKind.RUN: runs.c.id,
    ObjectKind.LOGGED_MODEL: logged_models.c.id,
    ObjectKind.REGISTERED_MODEL: registered_models.c.name,
    ObjectKind.DATASET: dataset_versions.c.id,
    ObjectKind.JOB: jobs.c.id,
    ObjectKind.SWEEP: sweeps.c.id,
}
CHUNK = 500


def find_owners(connection: Connection, references: Collection[Reference], organization: str) -> dict[Reference, Owner]:
    """Return the owner of each object that exists, with one query per kind.

    A model's name refers to the requesting organization's model: another organization may use the same name.
    """
    wanted: dict[ObjectKind, dict[str | int, Reference]] = {}
    for reference in references:
        if (key := stored_id(reference)) is not None:
            wanted.setdefault(reference.kind, {})[key] = reference
    wanted.pop(ObjectKind.ORGANIZATION, None)
    found = {reference: Owner(reference.id) for reference in references if reference.kind is ObjectKind.ORGANIZATION}
    for kind, ids in wanted.items():
        keys = list(ids)
        for start in range(0, len(keys), CHUNK):
            column, source = ID_COLUMNS[kind], _with_organization(kind)
            query = select(column, *source[1:]).select_from(source[0]).where(column.in_(keys[start : start + CHUNK]))
            if kind is ObjectKind.REGISTERED_MODEL:
                query = query.where(registered_models.c.organization == organization)
            for row in connection.execute(query):
                found[ids[row[0]]] = Owner(*row[1:])
    return found


def stored_id(reference: Reference) -> str | int | None:
    """Return the id as stored in the database, None if it is invalid."""
    if reference.kind is not ObjectKind.EXPERIMENT:
        return None if UNSTORABLE_CHARACTERS.search(reference.id) else reference.id
    try:
        number = int(reference.id)
    except ValueError:
        return None
    return number if 0 <= number <= MAX_INT64 else None


def _with_organization(kind: ObjectKind) -> tuple[FromClause, *tuple[Column[str], ...]]:
    """Return what to select from, and the columns of an `Owner`."""
    if kind is ObjectKind.LOGGED_MODEL:
        joined = logged_models.join(experiments, experiments.c.id == logged_models.c.experiment_id)
        return joined, experiments.c.organization
    table = ID_COLUMNS[kind].table
    return (table, table.c.organization, table.c.user_id) if kind is ObjectKind.JOB else (table, table.c.organization)


def file_organization(database: Database, uri: str) -> str:
    """Call `find_file_organization` in a transaction of its own."""
    with database.read() as connection:
        return find_file_organization(connection, uri)


def find_file_organization(connection: Connection, uri: str) -> str:
    """Return the organization of a file's run, model or folder; empty if unknown."""
    match uri.removeprefix("s3://").split("/"):
        case [uris.PRODUCT_BUCKET, "runs" | "checkpoints", owner, *_]:
            run_query = select(runs.c.organization).where(runs.c.id == owner)
            model_query = select(experiments.c.organization).join(logged_models).where(logged_models.c.id == owner)
            return connection.execute(run_query.union_all(model_query)).scalar() or ""
        case [uris.PRODUCT_BUCKET, "artifacts", folder, *_]:
            return uris.parse_organization(folder) or ""
        case [uris.PRODUCT_BUCKET, "datasets", *below] | [uris.MODELS_BUCKET, *below]:
            return folder_organization(below) or ""
        case _:
            return ""


def job_organization(database: Database, job: Job) -> str:
    """Return a job's organization: the submitted job's, else its files', else `default`.

    A program that Dagster starts by itself, such as a split, has no row in `jobs`.
    """
    submitted_id = job.id if job.program in PROGRAMS.values() else owner_id(job)
    submitted = select(jobs.c.organization).where(jobs.c.id == submitted_id)
    with database.read() as connection:
        if found := connection.execute(submitted).scalar():
            return str(found)
        places = (*job.outputs.values(), job.result_uri, *(each.uri for each in job.inputs.values()))
        owners = (find_file_organization(connection, uri) for uri in places)
        return next(filter(None, owners), DEFAULT_ORGANIZATION)


# The events of one organization's runs, jobs, models and datasets. The audit log is read separately.
#
# Most events carry no organization, so it is looked up by the object that they are about. Events about nodes of the cluster
# belong to no organization.


def list_events(
    connection: Connection, organization: str | None, after: int, types: Sequence[str] = (), limit: int = 100
) -> list[Event]:
    """Return events after `after` in commit order; of all organizations if none is given."""
    query = select(events).where(events.c.seq > after, events.c.topic != AUDIT).order_by(events.c.seq).limit(limit)
    if types:
        query = query.where(events.c.type.in_(types))
    if organization is not None:
        query = query.where(_belongs_to(organization))
    return [Event(**row) for row in connection.execute(query).mappings()]


def _belongs_to(organization: str) -> ColumnElement[bool]:
    run = exists().where(runs.c.id == events.c.key, runs.c.organization == organization)
    job = exists().where(jobs.c.id == events.c.key, jobs.c.organization == organization)
    dataset = exists().where(
        dataset_versions.c.id == events.c.payload["dataset_id"].as_string(), dataset_versions.c.organization == organization
    )
    experiment = exists().where(
        experiments.c.id == events.c.payload["experiment_id"].as_integer(), experiments.c.organization == organization
    )
    return or_(
        and_(events.c.topic == "jobs", or_(run, job)),
        and_(events.c.topic == "metrics", run),
        # An evaluation's key is its job; other model events name the organization, because model names are not unique.
        and_(events.c.topic == "models", events.c.type.startswith("evaluation."), job),
        and_(events.c.topic == "models", events.c.type.startswith("logged_model."), experiment),
        and_(events.c.topic == "datasets", dataset),
        # Deleted objects can no longer be looked up.
        and_(events.c.topic != AUDIT, events.c.payload["organization"].as_string() == organization),
    )
