"""The rows of registered models: locked, made, counted and read. What may be done with a model is `registered_models`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Table, and_, func, select, text, tuple_, update

from resources.errors import conflict
from resources.metadata.field_rules import printable
from resources.metadata.outbox import POSTGRES_OUTBOX_LOCK, emit, now_ms
from resources.metadata.registry.model_names import ModelKey, checked_model_name, model_not_found
from resources.metadata.registry.model_versions import ModelVersion, find_version, read_versions
from resources.metadata.tables import deployments, events
from resources.metadata.tables import model_aliases as aliases
from resources.metadata.tables import model_versions as versions
from resources.metadata.tables import registered_model_tags as model_tags
from resources.metadata.tables import registered_models as models
from resources.metadata.transactions import insert_into

RETIRING_EVENTS = ("model.deleted", "model.renamed")
LIVE_STATUSES = ("deploying", "serving", "withdrawing")


@dataclass(frozen=True)
class RegisteredModel:
    """A model. `latest` holds the newest version of each stage; `aliases` maps an alias to a version's number."""

    organization: str
    name: str
    creation_time: int
    last_update_time: int
    description: str
    last_version: int
    tags: Mapping[str, str]
    aliases: Mapping[str, int]
    latest: tuple[ModelVersion, ...]


def emit_model(writer: Connection, type: str, model: ModelKey, facts: Mapping[str, Any] | None = None) -> int:
    """An event of a model; it names the organization, because names alone are not unique."""
    return emit(writer, "models", type, model.name, {**model.row, **(facts or {})})


def lock_registry(writer: Connection) -> None:
    """One change of the registry at a time, until the transaction ends.

    Two promotions that both read "nothing is in production" would both be right. SQLite has one writer anyway; on
    PostgreSQL it is the lock of the outbox, taken early: every change ends in an event, and a second lock could be taken in
    another order by a transaction that has already emitted.
    """
    if writer.dialect.name == "postgresql":
        writer.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": POSTGRES_OUTBOX_LOCK})


def lock_model(writer: Connection, model: ModelKey) -> Mapping[str, Any]:
    """The row of a model that nobody else changes from here on."""
    lock_registry(writer)
    return model_row(writer, model)


def model_row(reader: Connection, model: ModelKey) -> Mapping[str, Any]:
    checked_model_name(model.name)
    row = reader.execute(select(models).where(model.row_filter(models))).mappings().first()
    if row is None:
        raise model_not_found(model.name)
    return dict(row)


def insert_model(writer: Connection, model: ModelKey, description: str = "") -> bool:
    """Make a model; false where the organization has one of that name."""
    now = now_ms()
    row = {**model.row, "creation_time": now, "last_update_time": now}
    made = insert_into(writer, models).values(**row, description=description, last_version=last_number(writer, model))
    # Not `rowcount`, which SQLAlchemy does not tell for every INSERT on PostgreSQL.
    if writer.execute(made.on_conflict_do_nothing().returning(models.c.name)).first() is None:
        return False
    emit_model(writer, "model.created", model)
    return True


def ensure_model(writer: Connection, model: ModelKey) -> None:
    """The model, made when it is missing."""
    checked_model_name(model.name)
    lock_registry(writer)
    insert_model(writer, model)


def last_number(reader: Connection, model: ModelKey) -> int:
    """The newest number that an earlier model of this name gave out."""
    left = select(events.c.payload).where(
        events.c.type.in_(RETIRING_EVENTS),
        events.c.key == model.name,
        events.c.payload["organization"].as_string() == model.organization,
    )
    payload = reader.execute(left.order_by(events.c.seq.desc()).limit(1)).scalar()
    return int(payload["last_version"]) if payload else 0


def touch_model(writer: Connection, model: ModelKey) -> None:
    writer.execute(update(models).where(model.row_filter(models)).values(last_update_time=now_ms()))


def check_not_served(reader: Connection, model: ModelKey, number: int | None = None, *, action: str) -> None:
    """Raises while a model (or one of its versions) is served, or is about to be."""
    live = select(deployments.c.version).where(model.row_filter(deployments), deployments.c.status.in_(LIVE_STATUSES))
    found = {row.version for row in reader.execute(live)}
    promoted = find_version(reader, model.row_filter(versions), versions.c.stage == "production")
    if promoted is not None and promoted.servable:
        found.add(promoted.version)
    remedy = f"`hanzo-ml model undeploy {printable(model.name)}` ends that, or wait for it, before it is {action}"
    if number is not None and number in found:
        raise conflict(f"{model.name} version {number} is served: {remedy}")
    if number is None and found:
        raise conflict(f"model '{model.name}' is served (version {max(found)}): {remedy}")


def find_copies(reader: Connection, model: ModelKey) -> list[ModelVersion]:
    """The versions of any model of the organization whose source is a version of this one."""
    beginning = f"models:/{model.name}/"
    source = func.substr(versions.c.source, 1, len(beginning)) == beginning  # LIKE takes `m` for `M` on SQLite
    return read_versions(reader, select(versions).where(versions.c.organization == model.organization, source))


def repoint_copy(writer: Connection, copy: ModelVersion, source: str) -> None:
    where = copy.model.row_filter(versions) & (versions.c.version == copy.version)
    writer.execute(update(versions).where(where).values(source=source))


def read_models(reader: Connection, organization: str, rows: Sequence[Mapping[str, Any]]) -> list[RegisteredModel]:
    """Models of one organization with their tags, their aliases and the newest version of each stage."""
    names = [row["name"] for row in rows]

    def owned_rows(table: Table) -> ColumnElement[bool]:
        return and_(table.c.organization == organization, table.c.name.in_(names))

    tags: dict[str, dict[str, str]] = {name: {} for name in names}
    for tag in reader.execute(select(model_tags).where(owned_rows(model_tags)).order_by(model_tags.c.key)):
        tags[tag.name][tag.key] = tag.value
    pointing: dict[str, dict[str, int]] = {name: {} for name in names}
    for alias in reader.execute(select(aliases).where(owned_rows(aliases)).order_by(aliases.c.alias)):
        pointing[alias.name][alias.alias] = alias.version
    newest = select(versions.c.name, func.max(versions.c.version)).where(owned_rows(versions))
    newest = newest.group_by(versions.c.name, versions.c.stage)
    query = select(versions).where(owned_rows(versions), tuple_(versions.c.name, versions.c.version).in_(newest))
    latest: dict[str, list[ModelVersion]] = {name: [] for name in names}
    for version in read_versions(reader, query.order_by(versions.c.version)):
        latest[version.name].append(version)
    return [
        RegisteredModel(**row, tags=tags[row["name"]], aliases=pointing[row["name"]], latest=tuple(latest[row["name"]]))
        for row in rows
    ]
