"""To which organization an object belongs: the one look-up behind every refusal of what is another's (row W5)."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

from sqlalchemy import Column, Connection, FromClause, select

from recipes.contracts.frozen_model import UNSTORABLE
from resources.metadata.tables import dataset_versions, experiments, jobs, logged_models, registered_models, runs, sweeps
from resources.metadata.tracking_rules import MAX_INT64


class Kind(StrEnum):
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
    """An object as a request names it."""

    kind: Kind
    id: str

    def __str__(self) -> str:
        """Of a name that nobody can have, too: one U+0000 in the audit log, and PostgreSQL reads no field of that row."""
        name = UNSTORABLE.sub("\ufffd", self.id[:100])
        return f"{self.kind}:{name}"


@dataclass(frozen=True)
class Owner:
    """`user_id` is empty where it does not matter who made an object."""

    organization: str
    user_id: str = ""


IDS: Mapping[Kind, Column[str]] = {
    Kind.EXPERIMENT: experiments.c.id,
    Kind.RUN: runs.c.id,
    Kind.LOGGED_MODEL: logged_models.c.id,
    Kind.REGISTERED_MODEL: registered_models.c.name,
    Kind.DATASET: dataset_versions.c.id,
    Kind.JOB: jobs.c.id,
    Kind.SWEEP: sweeps.c.id,
}
CHUNK = 500


def owners(connection: Connection, references: Collection[Reference], organization: str) -> dict[Reference, Owner]:
    """The owner of each object that exists: one query for each kind that is named.

    A model's name means the asking organization's own: another one's model of that name is another model.
    """
    wanted: dict[Kind, dict[str | int, Reference]] = {}
    for reference in references:
        if (key := stored_id(reference)) is not None:
            wanted.setdefault(reference.kind, {})[key] = reference
    wanted.pop(Kind.ORGANIZATION, None)
    found = {reference: Owner(reference.id) for reference in references if reference.kind is Kind.ORGANIZATION}
    for kind, ids in wanted.items():
        keys = list(ids)
        for start in range(0, len(keys), CHUNK):
            column, source = IDS[kind], _with_organization(kind)
            query = select(column, *source[1:]).select_from(source[0]).where(column.in_(keys[start : start + CHUNK]))
            if kind is Kind.REGISTERED_MODEL:
                query = query.where(registered_models.c.organization == organization)
            for row in connection.execute(query):
                found[ids[row[0]]] = Owner(*row[1:])
    return found


def stored_id(reference: Reference) -> str | int | None:
    """The id as the database holds it; None for what can be no id there."""
    if reference.kind is not Kind.EXPERIMENT:
        return None if UNSTORABLE.search(reference.id) else reference.id
    try:
        number = int(reference.id)
    except ValueError:
        return None
    return number if 0 <= number <= MAX_INT64 else None


def _with_organization(kind: Kind) -> tuple[FromClause, *tuple[Column[str], ...]]:
    """What to select from, and the columns of an `Owner`."""
    if kind is Kind.LOGGED_MODEL:
        joined = logged_models.join(experiments, experiments.c.id == logged_models.c.experiment_id)
        return joined, experiments.c.organization
    table = IDS[kind].table
    return (table, table.c.organization, table.c.user_id) if kind is Kind.JOB else (table, table.c.organization)
