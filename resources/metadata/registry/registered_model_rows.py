"""Lock, insert, count and read the rows of registered models."""

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
    """A model. `latest` is the newest version per stage; `aliases` maps to version numbers."""

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
    """Emit a model event that names the organization, because names alone are not unique."""
    return emit(writer, "models", type, model.name, {**model.row, **(facts or {})})


def lock_registry(writer: Connection) -> None:
    """Serialize changes of the registry until the transaction ends.

    Otherwise two promotions could both read "nothing is in production". SQLite has only one writer anyway; on PostgreSQL it
    is the outbox lock, taken early: every change ends in an event, and a separate lock could deadlock with a transaction
    that has already emitted one.
    """
    if writer.dialect.name == "postgresql":
        writer.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": POSTGRES_OUTBOX_LOCK})


def lock_model(writer: Connection, model: ModelKey) -> Mapping[str, Any]:
    """Return a model's row, locked against other writers until the transaction ends."""
    lock_registry(writer)
    return model_row(writer, model)


def model_row(reader: Connection, model: ModelKey) -> Mapping[str, Any]:
    checked_model_name(model.name)
    row = reader.execute(select(models).where(model.row_filter(models))).mappings().first()
    if row is None:
        raise model_not_found(model.name)
    return dict(row)


def insert_model(writer: Connection, model: ModelKey, description: str = "") -> bool:
    """Insert a model; False if the organization has one of that name."""
    now = now_ms()
    row = {**model.row, "creation_time": now, "last_update_time": now}
    made = insert_into(writer, models).values(**row, description=description, last_version=last_number(writer, model))
    # Not `rowcount`, which SQLAlchemy does not report for every INSERT on PostgreSQL.
    if writer.execute(made.on_conflict_do_nothing().returning(models.c.name)).first() is None:
        return False
    emit_model(writer, "model.created", model)
    return True


def ensure_model(writer: Connection, model: ModelKey) -> None:
    """Create the model if it is missing."""
    checked_model_name(model.name)
    lock_registry(writer)
    insert_model(writer, model)


def last_number(reader: Connection, model: ModelKey) -> int:
    """Return the highest version number used by an earlier model of this name."""
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
    """Raise if a model, or one of its versions, is served or about to be."""
    live = select(deployments.c.version).where(model.row_filter(deployments), deployments.c.status.in_(LIVE_STATUSES))
    found = {row.version for row in reader.execute(live)}
    promoted = find_version(reader, model.row_filter(versions), versions.c.stage == "production")
    if promoted is not None and promoted.servable:
        found.add(promoted.version)
    remedy = f"run `hanzo-ml model undeploy {printable(model.name)}` and wait until it ends, before it is {action}"
    if number is not None and number in found:
        raise conflict(f"{model.name} version {number} is served: {remedy}")
    if number is None and found:
        raise conflict(f"model '{model.name}' is served (version {max(found)}): {remedy}")


def find_copies(reader: Connection, model: ModelKey) -> list[ModelVersion]:
    """Return the organization's versions whose source is a version of this model."""
    beginning = f"models:/{model.name}/"
    source = func.substr(versions.c.source, 1, len(beginning)) == beginning  # LIKE is case-insensitive on SQLite
    return read_versions(reader, select(versions).where(versions.c.organization == model.organization, source))


def repoint_copy(writer: Connection, copy: ModelVersion, source: str) -> None:
    where = copy.model.row_filter(versions) & (versions.c.version == copy.version)
    writer.execute(update(versions).where(where).values(source=source))


def read_models(reader: Connection, organization: str, rows: Sequence[Mapping[str, Any]]) -> list[RegisteredModel]:
    """Return one organization's models with tags, aliases and the newest version per stage."""
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
