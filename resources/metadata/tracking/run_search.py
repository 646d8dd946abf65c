"""Search runs by attributes, params, tags, newest metrics and inputs, page by page."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from sqlalchemy import ColumnElement, Connection, FromClause, Select, and_, case, func, select

from resources.metadata.database import Database
from resources.metadata.filters.pagination import Keyset, SortKey, nulls_last
from resources.metadata.filters.parser import Condition, Grammar, Order, Value, refuse_too_many_values
from resources.metadata.filters.sql import Parameters, compare, compare_keyed, dialect_value, row_matches
from resources.metadata.tables import latest_metrics, params, run_tags, runs
from resources.metadata.tables.tracking import FOUND_BY
from resources.metadata.tracking.logged_runs import LoggedRun, load_logged
from resources.metadata.tracking.run_inputs import uses_dataset
from resources.metadata.tracking.run_states import Run
from resources.metadata.transactions import Statement, parameter, reading

_TEXTS = {
    "run_id": "id",
    "run_name": "name",
    **dict.fromkeys(("run name", "Run name", "Run Name"), "name"),
    "status": "status",
    "artifact_uri": "artifact_uri",
    "user_id": "user_id",
}
_NUMBERS = {**dict.fromkeys(("start_time", "created", "Created"), "start_time"), "end_time": "end_time"}

RUN_GRAMMAR = Grammar(
    numbers=_NUMBERS,
    texts=_TEXTS,
    entities={
        **dict.fromkeys(("metric", "metrics"), "metric"),
        **dict.fromkeys(("param", "params", "parameter", "parameters"), "param"),
        **dict.fromkeys(("tag", "tags"), "tag"),
        **dict.fromkeys(("attribute", "attributes", "attr", "run"), "attribute"),
        **dict.fromkeys(("dataset", "datasets"), "dataset"),
    },
    orders={**_NUMBERS, **_TEXTS},
    dataset_keys=frozenset({"name", "digest", "context"}),
)
STATUS_ORDER = {status: place for place, status in enumerate(("failed", "completed", "cancelled", "running", "queued"))}
"""Statuses in the alphabetical order of MLflow's names for them, which clients expect."""
KEYED_TABLES = {"metric": latest_metrics, "param": params, "tag": run_tags}
MAX_JOINS = 30
"""SQLite joins at most 64 tables. Further conditions become subqueries per run, at the same cost but in a fixed order."""


@dataclass(frozen=True)
class FoundRuns:
    """A page of a search, without what the runs logged."""

    runs: list[Run]
    next_page_token: str | None


@dataclass(frozen=True)
class RunPage:
    runs: list[LoggedRun]
    next_page_token: str | None


@dataclass(frozen=True)
class QueryShape:
    """Everything that determines the SQL text of a search: all but the values."""

    dialect: str
    experiments: int
    conditions: tuple[Condition, ...]
    orders: tuple[Order, ...]
    lifecycle_stages: tuple[str, ...]
    by_organization: bool


class RunSearch:
    """Searches the runs of a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def search(
        self,
        experiment_ids: Sequence[int],
        *,
        conditions: Sequence[Condition] = (),
        orders: Sequence[Order] = (),
        lifecycle_stages: Sequence[str] = ("active",),
        limit: int = 1000,
        page_token: str | None = None,
        organization: str | None = None,
        connection: Connection | None = None,
    ) -> RunPage:
        """Call `find`, and load what the runs logged."""
        with reading(self._database, connection) as reader:
            page = self.find(
                experiment_ids,
                conditions=conditions,
                orders=orders,
                lifecycle_stages=lifecycle_stages,
                limit=limit,
                page_token=page_token,
                organization=organization,
                connection=reader,
            )
            return RunPage(load_logged(reader, page.runs), page.next_page_token)

    def find(
        self,
        experiment_ids: Sequence[int],
        *,
        conditions: Sequence[Condition] = (),
        orders: Sequence[Order] = (),
        lifecycle_stages: Sequence[str] = ("active",),
        limit: int = 1000,
        page_token: str | None = None,
        organization: str | None = None,
        connection: Connection | None = None,
    ) -> FoundRuns:
        """Return runs of these experiments, by default newest first."""
        refuse_too_many_values(experiment_ids, conditions)
        keyset = _sorting(tuple(orders)).keyset
        position = keyset.position(page_token)
        with reading(self._database, connection) as reader:
            dialect = reader.dialect.name
            unvalued = tuple(_without_value(condition) for condition in conditions)
            shape = QueryShape(
                dialect, len(experiment_ids), unvalued, tuple(orders), tuple(lifecycle_stages), organization is not None
            )
            values = {"organization": organization, "limit": limit + 1}
            values |= {f"experiment_{place}": number for place, number in enumerate(experiment_ids)}
            for place, condition in enumerate(conditions):
                values |= _values(f"value_{place}", dialect_value(condition.operator, condition.value, dialect))
            values |= {f"after_{place}": value for place, value in enumerate(position or ())}
            known = None if position is None else tuple(value is not None for value in position)
            rows = _statement(shape, known).rows(reader, **values)
            columns = len(runs.c)
            return FoundRuns([Run(*row[:columns]) for row in rows[:limit]], keyset.next_token(rows, limit))

    def get(self, run: Run, *, connection: Connection | None = None) -> LoggedRun:
        """Return a run with what it logged."""
        with reading(self._database, connection) as reader:
            return load_logged(reader, [run])[0]


@lru_cache(maxsize=100)
def _statement(shape: QueryShape, known: tuple[bool, ...] | None) -> Statement:
    """Build the statement of a search.

    For later pages, `known` states which values of the position are not NULL.
    """
    experiments = [parameter(f"experiment_{place}") for place in range(shape.experiments)]
    query = select(runs).where(runs.c.experiment_id.in_(experiments), runs.c.lifecycle_stage.in_(shape.lifecycle_stages))
    if shape.by_organization:
        query = query.where(runs.c.organization == parameter("organization"))
    for place, condition in enumerate(shape.conditions):
        value = _parameters(f"value_{place}", condition.value)
        if condition.entity in KEYED_TABLES and condition.operator != "IS NULL" and place < MAX_JOINS:
            query = _joined(query, condition, value, shape.dialect)
        else:
            query = query.where(_where(condition, value, shape.dialect))
    sorting = _sorting(shape.orders)
    # After the conditions: SQLite joins in this order, and so looks up sort values only for matching runs.
    for table, key in sorting.joined:
        query = query.outerjoin(table, (table.c.run_id == runs.c.id) & (table.c.key == key))
    position = (
        None if known is None else [parameter(f"after_{n}") if has_value else None for n, has_value in enumerate(known)]
    )
    return Statement(sorting.keyset.ordered(query, position).limit(parameter("limit")))


def _joined(query: Select[Any], condition: Condition, value: Parameters, dialect: str) -> Select[Any]:
    """Join the rows that match a condition; never duplicates a run."""
    table = KEYED_TABLES[condition.entity].alias()
    row = (table.c.run_id == runs.c.id) & (table.c.key == condition.key)
    if dialect == "postgresql" and condition.operator == "=" and condition.entity != "metric":
        row &= func.left(table.c.value, FOUND_BY) == func.left(value, FOUND_BY)  # the expression of the index
    return query.join(table, and_(row, row_matches(table, condition, value, dialect)))


def _where(condition: Condition, value: Parameters, dialect: str) -> ColumnElement[bool]:
    if condition.entity == "attribute":
        return compare(runs.c[condition.key], condition.operator, value, dialect)
    if condition.entity == "dataset":
        return uses_dataset(condition, value, dialect)
    table = KEYED_TABLES[condition.entity]
    return compare_keyed(table, table.c.run_id == runs.c.id, condition, dialect, value)


@dataclass(frozen=True)
class Sorting:
    """An order of a search: its keys, and the tables to join for their values."""

    keyset: Keyset
    joined: list[tuple[FromClause, str]]


@lru_cache(maxsize=100)
def _sorting(orders: tuple[Order, ...]) -> Sorting:
    keys: list[SortKey] = []
    joined: list[tuple[FromClause, str]] = []
    for order in orders:
        if (order.entity, order.key) == ("attribute", "status"):
            keys.append(SortKey(case(STATUS_ORDER, value=runs.c.status), order.ascending, int))
        elif order.entity == "attribute":
            kind = int if order.key in _NUMBERS.values() else str
            keys += nulls_last(runs.c[order.key], order.ascending, kind)
        else:
            table, metric = KEYED_TABLES[order.entity].alias(), order.entity == "metric"
            joined.append((table, order.key))
            keys += nulls_last(table.c.value, order.ascending, float if metric else str, table.c.is_nan if metric else None)
    last = [SortKey(runs.c.start_time, False, int), SortKey(runs.c.id, True, str)]
    return Sorting(Keyset([*keys, *last], scope=orders), joined)


def _without_value(condition: Condition) -> Condition:
    """Remove a condition's value, keeping only the number of values of a list."""
    value = condition.value
    return replace(condition, value=("",) * len(value) if isinstance(value, tuple) else None)


def _parameters(name: str, value: Value) -> Parameters:
    if isinstance(value, tuple):
        return tuple(parameter(f"{name}_{place}") for place in range(len(value)))
    return parameter(name)


def _values(name: str, value: Value) -> dict[str, Any]:
    if isinstance(value, tuple):
        return {f"{name}_{place}": each for place, each in enumerate(value)}
    return {name: value}
