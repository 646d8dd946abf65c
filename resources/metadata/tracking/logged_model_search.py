"""Search logged models by their attributes, params, tags and metrics, page by page.

Source: `SearchLoggedModels` of MLflow 3.17. Unlike for runs, a metric matches if any of its points does, and an order by a
metric uses the most recently measured point.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, FromClause, and_, case, exists, func, or_, select, true

from resources.errors import invalid
from resources.metadata.database import Database
from resources.metadata.field_rules import MAX_KEY, checked_text, printable
from resources.metadata.filters.pagination import Keyset, SortKey, nulls_last
from resources.metadata.filters.parser import LISTABLE_TEXT, Condition, Grammar, refuse_too_many_values
from resources.metadata.filters.sql import compare_absent, compare_keyed
from resources.metadata.tables import (
    experiments,
    logged_model_metrics,
    logged_model_params,
    logged_model_tags,
    logged_models,
)
from resources.metadata.tracking.logged_model_records import LoggedModel, ModelDetails
from resources.metadata.tracking.logged_models import load_details
from resources.metadata.tracking.logged_runs import CHUNK
from resources.metadata.transactions import reading

MAX_ORDERS = 20
TOKEN_MISMATCHES = (
    "Experiment IDs in the page token do not match the requested experiment IDs: send those of the first page",
    "Filter string in the page token does not match the requested filter string: send that of the first page",
    "Order by in the page token does not match the requested order by: send that of the first page",
)
"""MLflow's errors for a token of another search, in this order."""
_NUMBERS = {
    **dict.fromkeys(("creation_time", "creation_timestamp", "creation_timestamp_ms"), "created_at"),
    **dict.fromkeys(("last_updated_timestamp", "last_updated_timestamp_ms"), "updated_at"),
}
_TEXTS = {
    "model_id": "id",
    "artifact_location": "artifact_uri",
    **{name: name for name in ("name", "status", "status_message", "model_type", "source_run_id", "lifecycle_stage")},
}

LOGGED_MODEL_GRAMMAR = Grammar(
    numbers=_NUMBERS,
    texts=_TEXTS,
    entities={"attributes": "attribute", "metrics": "metric", "params": "param", "tags": "tag"},
    orders={**_NUMBERS, **_TEXTS},
    keyed_operators=LISTABLE_TEXT,
    malformed="Invalid filter string",
    bad_comparator="Invalid comparison operator",
)
_metrics = logged_model_metrics.c
STATUS_ORDER = {status: place for place, status in enumerate(("pending", "ready", "failed"))}
"""The order of MLflow's enum values."""
KEYED_TABLES = {"param": logged_model_params, "tag": logged_model_tags}


@dataclass(frozen=True)
class MeasuredOn:
    """A dataset on which metrics were measured, by name, digest or both (empty matches any)."""

    name: str = ""
    digest: str = ""


@dataclass(frozen=True)
class ModelOrder:
    """An attribute, or `metrics.KEY`, on any dataset unless one is given."""

    field: str
    ascending: bool = True
    on: MeasuredOn | None = None


@dataclass(frozen=True)
class ModelPage:
    models: list[ModelDetails]
    next_page_token: str | None


class LoggedModelSearch:
    """Searches the logged models of a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def search(
        self,
        experiment_ids: Sequence[int],
        *,
        conditions: Sequence[Condition] = (),
        datasets: Sequence[MeasuredOn] = (),
        orders: Sequence[ModelOrder] = (),
        limit: int = 50,
        page_token: str | None = None,
        organization: str | None = None,
        connection: Connection | None = None,
    ) -> ModelPage:
        """Return undeleted models of these experiments, by default newest first."""
        refuse_too_many_values(experiment_ids, conditions)
        query = select(logged_models).where(
            logged_models.c.experiment_id.in_(experiment_ids), logged_models.c.lifecycle_stage != "deleted"
        )
        if organization is not None:
            query = query.join(experiments).where(experiments.c.organization == organization)
        mismatches = zip(TOKEN_MISMATCHES, (list(experiment_ids), list(conditions), list(orders)), strict=True)
        keyset = Keyset(_keys(orders), scope=list(datasets), mismatches=dict(mismatches))
        with reading(self._database, connection) as reader:
            for condition in conditions:
                query = query.where(_where(condition, datasets, reader.dialect.name))
            if datasets and not any(condition.entity == "metric" for condition in conditions):
                query = query.where(exists().where(_belongs_to_model(logged_model_metrics), _measured(datasets)))
            rows = reader.execute(keyset.page(query, limit, page_token)).all()
            found = [LoggedModel(*row[: len(logged_models.c)]) for row in rows[:limit]]
            chunks = [found[start : start + CHUNK] for start in range(0, len(found), CHUNK)]
            details = [model for chunk in chunks for model in load_details(reader, chunk)]
        return ModelPage(details, keyset.next_token(rows, limit))


def _where(condition: Condition, datasets: Sequence[MeasuredOn], dialect: str) -> ColumnElement[bool]:
    if condition.entity == "attribute":
        return compare_absent(logged_models.c[condition.key], condition.operator, condition.value, dialect)
    if condition.entity == "metric":
        owner = _belongs_to_model(logged_model_metrics) & _measured(datasets)
        return compare_keyed(logged_model_metrics, owner, condition, dialect)
    table = KEYED_TABLES[condition.entity]
    return compare_keyed(table, _belongs_to_model(table), condition, dialect)


def _belongs_to_model(table: FromClause) -> ColumnElement[bool]:
    owned: ColumnElement[bool] = table.c.model_id == logged_models.c.id
    return owned


def _measured(datasets: Sequence[MeasuredOn]) -> ColumnElement[bool]:
    """Return whether a metric was measured on one of these datasets; always true without any."""
    if not datasets:
        return true()
    return or_(
        *(
            and_(
                _metrics.dataset_name == dataset.name if dataset.name else true(),
                _metrics.dataset_digest == dataset.digest if dataset.digest else true(),
            )
            for dataset in datasets
        )
    )


def _keys(orders: Sequence[ModelOrder]) -> list[SortKey]:
    if len(orders) > MAX_ORDERS:
        raise invalid(f"order_by can contain at most {MAX_ORDERS} fields")
    keys: list[SortKey] = []
    for order in orders:
        entity, dot, metric = order.field.partition(".")
        if not dot:
            column, kind = _column(order.field)
            keys.append(SortKey(column, order.ascending, kind))
            continue
        if entity != "metrics" or len(metric) > MAX_KEY:
            raise invalid(f"Invalid order by field name: {printable(order.field)}. Only metrics are supported.")
        key = checked_text(metric.strip("`"), "order_by")
        value, is_nan = (_newest(column, key, order.on) for column in (_metrics.value, _metrics.is_nan))
        keys += nulls_last(value, order.ascending, float, is_nan)
    return [*keys, SortKey(logged_models.c.created_at, False, int), SortKey(logged_models.c.id, True, str)]


def _column(field: str) -> tuple[ColumnElement[Any], type]:
    """Return the (never NULL) sort column of a field, and its values' Python type."""
    name = LOGGED_MODEL_GRAMMAR.orders.get(field)
    if name is None:
        raise invalid(f"Invalid order by field name: {printable(field)}")
    if name == "status":
        return case(STATUS_ORDER, value=logged_models.c.status), int
    if name in _NUMBERS.values():
        return logged_models.c[name], int
    return func.coalesce(logged_models.c[name], ""), str


def _newest(column: ColumnElement[Any], key: str, on: MeasuredOn | None) -> ColumnElement[Any]:
    """Select a column of a model's newest point of a metric, by primary key."""
    query = select(column).where(_belongs_to_model(logged_model_metrics), _metrics.key == key, _measured([on] if on else []))
    newest = query.order_by(_metrics.timestamp.desc(), _metrics.step.desc(), _metrics.run_id, _metrics.value).limit(1)
    return newest.correlate(logged_models).scalar_subquery()
