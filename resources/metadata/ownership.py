"""The events of one organization: those about its runs, jobs, models and datasets. The audit log is read elsewhere.

Most events carry no organization, so it is that of the object that they are about; what belongs to a node of the cluster
belongs to no organization.
"""

from collections.abc import Sequence

from sqlalchemy import ColumnElement, Connection, and_, exists, or_, select

from resources.metadata.audit import TOPIC as AUDIT
from resources.metadata.outbox import Event
from resources.metadata.tables import dataset_versions, events, experiments, jobs, runs


def events_of(
    connection: Connection, organization: str | None, after: int, types: Sequence[str] = (), limit: int = 100
) -> list[Event]:
    """Events after `after` in the order of their commits; of every organization where none is given."""
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
        # An evaluation's key is its job; everything else of a model names the organization, as its name is not enough.
        and_(events.c.topic == "models", events.c.type.startswith("evaluation."), job),
        and_(events.c.topic == "models", events.c.type.startswith("logged_model."), experiment),
        and_(events.c.topic == "datasets", dataset),
        # What is deleted is found nowhere else.
        and_(events.c.topic != AUDIT, events.c.payload["organization"].as_string() == organization),
    )
