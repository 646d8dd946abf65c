"""The rows of registered models: locked, made, counted and read. What may be done with a model is `registered_models`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, select, text, tuple_, update

from resources.errors import ErrorCode, HanzoError, conflict
from resources.metadata.model_version_rules import checked_model_name, no_model
from resources.metadata.model_versions import ModelVersion, find_version, read_versions
from resources.metadata.outbox import POSTGRES_OUTBOX_LOCK, emit, now_ms
from resources.metadata.tables import deployments, events
from resources.metadata.tables import model_aliases as aliases
from resources.metadata.tables import model_versions as versions
from resources.metadata.tables import registered_model_tags as model_tags
from resources.metadata.tables import registered_models as models
from resources.metadata.transactions import insert_into

RETIRING = ("model.deleted", "model.renamed")
LIVE = ("deploying", "serving")


@dataclass(frozen=True)
class RegisteredModel:
    """A model. `latest` holds the newest version of each stage; `aliases` maps an alias to a version's number."""

    name: str
    organization: str
    creation_time: int
    last_update_time: int
    description: str
    last_version: int
    tags: Mapping[str, str]
    aliases: Mapping[str, int]
    latest: tuple[ModelVersion, ...]


def lock_registry(writer: Connection) -> None:
    """One change of the registry at a time, until the transaction ends.

    Two promotions that both read "nothing is in production" would both be right. SQLite has one writer anyway; on
    PostgreSQL it is the lock of the outbox, taken early: every change ends in an event, and a second lock could be taken in
    another order by a transaction that has already emitted.
    """
    if writer.dialect.name == "postgresql":
        writer.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": POSTGRES_OUTBOX_LOCK})


def lock_model(writer: Connection, name: str, organization: str | None = None) -> Mapping[str, Any]:
    """The row of a model that nobody else changes from here on."""
    lock_registry(writer)
    return model_row(writer, name, organization)


def model_row(reader: Connection, name: str, organization: str | None = None) -> Mapping[str, Any]:
    query = select(models).where(models.c.name == checked_model_name(name))
    if organization is not None:
        query = query.where(models.c.organization == organization)
    row = reader.execute(query).mappings().first()
    if row is None:
        raise no_model(name)
    return dict(row)


def insert_model(writer: Connection, name: str, organization: str, description: str = "") -> bool:
    """Make a model; false where the name is taken."""
    now = now_ms()
    row = {"name": name, "organization": organization, "creation_time": now, "last_update_time": now}
    made = insert_into(writer, models).values(**row, description=description, last_version=last_number(writer, name))
    # Not `rowcount`, which SQLAlchemy does not tell for every INSERT on PostgreSQL.
    if writer.execute(made.on_conflict_do_nothing().returning(models.c.name)).first() is None:
        return False
    emit(writer, "models", "model.created", name, {"name": name, "organization": organization})
    return True


def ensure_model(writer: Connection, name: str, organization: str) -> None:
    """The model of that name, made when it is missing. Raises when it is another organization's."""
    checked_model_name(name)
    lock_registry(writer)
    if insert_model(writer, name, organization):
        return
    if writer.execute(select(models.c.organization).where(models.c.name == name)).scalar_one() != organization:
        raise HanzoError(ErrorCode.PERMISSION_DENIED, f"the model name '{name}' is taken: choose another")


def last_number(reader: Connection, name: str) -> int:
    """The newest number that an earlier model of this name gave out."""
    left = select(events.c.payload).where(events.c.type.in_(RETIRING), events.c.key == name).order_by(events.c.seq.desc())
    payload = reader.execute(left.limit(1)).scalar()
    return int(payload["last_version"]) if payload else 0


def touch(writer: Connection, name: str) -> None:
    writer.execute(update(models).where(models.c.name == name).values(last_update_time=now_ms()))


def check_not_served(reader: Connection, name: str, number: int | None = None, *, action: str) -> None:
    """Raises while a model (or one of its versions) is served, or is about to be."""
    live = select(deployments.c.version).where(deployments.c.name == name, deployments.c.status.in_(LIVE))
    found = {row.version for row in reader.execute(live)}
    promoted = find_version(reader, versions.c.name == name, versions.c.stage == "production")
    if promoted is not None and promoted.servable:
        found.add(promoted.version)
    if number is not None and number in found:
        raise conflict(f"{name} version {number} is served: promote another version to production before it is {action}")
    if number is None and found:
        raise conflict(f"model '{name}' is served (version {max(found)}): stop serving it before it is {action}")


def copies(reader: Connection, name: str) -> list[ModelVersion]:
    """The versions of any model whose source is a version of this one."""
    return read_versions(reader, select(versions).where(versions.c.source.startswith(f"models:/{name}/", autoescape=True)))


def repoint(writer: Connection, copy: ModelVersion, source: str) -> None:
    where = (versions.c.name == copy.name) & (versions.c.version == copy.version)
    writer.execute(update(versions).where(where).values(source=source))


def read_models(reader: Connection, rows: Sequence[Mapping[str, Any]]) -> list[RegisteredModel]:
    """Models with their tags, their aliases and the newest version of each stage."""
    names = [row["name"] for row in rows]
    tags: dict[str, dict[str, str]] = {name: {} for name in names}
    for tag in reader.execute(select(model_tags).where(model_tags.c.name.in_(names)).order_by(model_tags.c.key)):
        tags[tag.name][tag.key] = tag.value
    pointing: dict[str, dict[str, int]] = {name: {} for name in names}
    for alias in reader.execute(select(aliases).where(aliases.c.name.in_(names)).order_by(aliases.c.alias)):
        pointing[alias.name][alias.alias] = alias.version
    newest = select(versions.c.name, func.max(versions.c.version)).where(versions.c.name.in_(names))
    newest = newest.group_by(versions.c.name, versions.c.stage)
    query = select(versions).where(tuple_(versions.c.name, versions.c.version).in_(newest)).order_by(versions.c.version)
    latest: dict[str, list[ModelVersion]] = {name: [] for name in names}
    for version in read_versions(reader, query):
        latest[version.name].append(version)
    return [
        RegisteredModel(**row, tags=tags[row["name"]], aliases=pointing[row["name"]], latest=tuple(latest[row["name"]]))
        for row in rows
    ]
