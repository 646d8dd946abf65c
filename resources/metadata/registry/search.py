"""List and search models and versions, page by page."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, Table, select, tuple_

from resources.metadata.database import Database
from resources.metadata.filters.pagination import Keyset, SortKey
from resources.metadata.filters.parser import TEXT, Condition, Grammar, Order
from resources.metadata.filters.sql import compare_absent, compare_keyed
from resources.metadata.registry.model_names import PROMPT_TAG, ModelKey
from resources.metadata.registry.model_versions import NEWEST_FIRST, ModelVersion, read_versions
from resources.metadata.registry.registered_model_rows import RegisteredModel, model_row, read_models
from resources.metadata.tables import model_version_tags as version_tags
from resources.metadata.tables import model_versions as versions
from resources.metadata.tables import registered_model_tags as model_tags
from resources.metadata.tables import registered_models as models

# Pages of `/v1/models`: an organization's models by name, and a model's versions, newest first.

MAX_PAGE = 1000


def page_models(
    database: Database, organization: str, *, limit: int = MAX_PAGE, page_token: str | None = None
) -> tuple[list[dict[str, Any]], str | None]:
    """Return models with their tags, and the token of the next page."""
    order = Keyset([SortKey(models.c.name, True, str)], ("models", organization))
    query = select(models).where(models.c.organization == organization)
    with database.read() as connection:
        rows = connection.execute(order.page(query, limit, page_token)).all()
        columns = tuple(models.c.keys())
        listed: list[dict[str, Any]] = [dict(zip(columns, row, strict=False)) for row in rows[:limit]]
        tags: dict[str, dict[str, str]] = {model["name"]: {} for model in listed}
        row_conditions = (model_tags.c.organization == organization, model_tags.c.name.in_(tags))
        for tag in connection.execute(select(model_tags).where(*row_conditions).order_by(model_tags.c.key)):
            tags[tag.name][tag.key] = tag.value
    return [model | {"tags": tags[model["name"]]} for model in listed], order.next_token(rows, limit)


def page_versions(
    database: Database, model: ModelKey, *, limit: int = MAX_PAGE, page_token: str | None = None
) -> tuple[list[ModelVersion], str | None]:
    """Return a model's versions and the next page's token. Raises without such a model."""
    order = Keyset([SortKey(versions.c.version, False, int)], ("versions", model.organization, model.name))
    query = select(versions).where(model.row_filter(versions))
    if position := order.position(page_token):
        query = query.where(versions.c.version < position[0])
    with database.read() as connection:
        model_row(connection, model)
        found = read_versions(connection, query.order_by(NEWEST_FIRST).limit(limit + 1))
    return found[:limit], order.next_token([(version.version,) for version in found], limit)


# Search models and versions with MLflow's filters and orders, page by page.
#
# Prompts are models with a tag. As in MLflow, a search returns them only if its filter names that tag.

CHUNK = 500
"""Models or versions read by one query: SQLite allows at most 32,766 variables."""

_ENTITIES = {**dict.fromkeys(("tag", "tags"), "tag"), "attribute": "attribute"}
MODEL_GRAMMAR = Grammar(
    numbers={},
    texts={"name": "name"},
    entities=_ENTITIES,
    orders={
        "name": "name",
        **dict.fromkeys(("timestamp", "last_updated_timestamp"), "last_update_time"),
    },
    keyed_operators=TEXT,
    sortable=frozenset({"attribute"}),
    bad_order="Invalid order by key",
)
VERSION_GRAMMAR = Grammar(
    numbers={"version_number": "version"},
    texts={"name": "name", "run_id": "run_id", "source_path": "source"},
    entities=_ENTITIES,
    orders={
        "name": "name",
        "version_number": "version",
        "creation_timestamp": "created_at",
        "last_updated_timestamp": "updated_at",
    },
    quotable=frozenset({"version"}),
    keyed_operators=TEXT,
    sortable=frozenset({"attribute"}),
)


@dataclass(frozen=True)
class ModelPage:
    models: list[RegisteredModel]
    next_page_token: str | None


@dataclass(frozen=True)
class VersionPage:
    versions: list[ModelVersion]
    next_page_token: str | None


class RegistrySearch:
    """Searches the registry of one organization."""

    def __init__(self, database: Database, organization: str) -> None:
        self._database = database
        self._organization = organization

    def models(
        self, conditions: Sequence[Condition], orders: Sequence[Order], limit: int, page_token: str | None
    ) -> ModelPage:
        """Return models, by default ordered by name."""
        query: Select[Any] = select(models).where(models.c.organization == self._organization)
        keyset = Keyset(_keys(models, orders, [Order("attribute", "name", True)]), scope=("models", *orders))
        with self._database.read() as reader:
            owner = (model_tags.c.organization == self._organization) & (model_tags.c.name == models.c.name)
            query = _filtered(query, conditions, models, model_tags, owner, self._organization, reader.dialect.name)
            rows = reader.execute(keyset.page(query, limit, page_token)).all()
            found: list[RegisteredModel] = []
            for start in range(0, len(rows[:limit]), CHUNK):
                part = [dict(zip(models.c.keys(), row, strict=False)) for row in rows[:limit][start : start + CHUNK]]
                found += read_models(reader, self._organization, part)
        return ModelPage(found, keyset.next_token(rows, limit))

    def versions(
        self, conditions: Sequence[Condition], orders: Sequence[Order], limit: int, page_token: str | None
    ) -> VersionPage:
        """Return versions, by default the most recently changed first."""
        own = versions.c.organization == self._organization
        query: Select[Any] = select(versions.c.name, versions.c.version).where(own)
        first = orders or [Order("attribute", "updated_at", False)]
        ties = [Order("attribute", "name", True), Order("attribute", "version", False)]
        keyset = Keyset(_keys(versions, first, ties), scope=("versions", *orders))
        with self._database.read() as reader:
            owner = (
                (version_tags.c.organization == self._organization)
                & (version_tags.c.name == versions.c.name)
                & (version_tags.c.version == versions.c.version)
            )
            query = _filtered(query, conditions, versions, version_tags, owner, self._organization, reader.dialect.name)
            rows = reader.execute(keyset.page(query, limit, page_token)).all()
            keys = [(str(row[0]), int(row[1])) for row in rows[:limit]]
            found = _read_in_order(reader, self._organization, keys)
        return VersionPage(found, keyset.next_token(rows, limit))


def _read_in_order(reader: Connection, organization: str, keys: Sequence[tuple[str, int]]) -> list[ModelVersion]:
    found: dict[tuple[str, int], ModelVersion] = {}
    for start in range(0, len(keys), CHUNK):
        wanted = tuple_(versions.c.name, versions.c.version).in_(keys[start : start + CHUNK])
        own = versions.c.organization == organization
        for version in read_versions(reader, select(versions).where(own, wanted)):
            found[version.name, version.version] = version
    return [found[key] for key in keys]


def _keys(table: Table, orders: Sequence[Order], ties: Sequence[Order]) -> list[SortKey]:
    named = {order.key for order in orders}
    used = [*orders, *(order for order in ties if order.key not in named)]
    return [SortKey(table.c[order.key], order.ascending, str if order.key == "name" else int) for order in used]


def _filtered(
    query: Select[Any],
    conditions: Sequence[Condition],
    table: Table,
    tags: Table,
    owner: ColumnElement[bool],
    organization: str,
    dialect: str,
) -> Select[Any]:
    prompts = asks_for_prompts(conditions)
    for condition in conditions:
        if condition.entity == "attribute":
            query = query.where(compare_absent(table.c[condition.key], condition.operator, condition.value, dialect))
        elif condition.key != PROMPT_TAG:
            query = query.where(compare_keyed(tags, owner, condition, dialect))
    marked = select(tags.c.name).where(tags.c.organization == organization, tags.c.key == PROMPT_TAG, tags.c.value == "true")
    return query.where(table.c.name.in_(marked) if prompts else table.c.name.not_in(marked))


def asks_for_prompts(conditions: Sequence[Condition]) -> bool:
    """Return whether a filter selects prompts.

    A model has no such tag, but `!= 'true'` must match it.
    """
    for condition in conditions:
        if condition.entity == "tag" and condition.key == PROMPT_TAG:
            wanted = {"=": "true", "!=": "false"}.get(condition.operator)
            return str(condition.value).lower() == wanted
    return False
