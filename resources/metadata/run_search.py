"""Finding runs: MLflow's filters and orders over runs, their params, tags and newest metrics, page by page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, select

from resources.metadata.database import Database
from resources.metadata.filter_language import Condition, Grammar, Order
from resources.metadata.filter_sql import compare, compare_keyed, ordered
from resources.metadata.page_token import decode_token, encode_token
from resources.metadata.run_states import Run
from resources.metadata.tables import latest_metrics, params, run_tags, runs
from resources.metadata.tracking_rules import MetricPoint
from resources.metadata.transactions import reading

CHUNK = 500
"""Runs whose data are read by one query: SQLite takes at most 32,766 variables."""

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
    },
    orders={**_NUMBERS, **_TEXTS},
)
KEYED = {"metric": latest_metrics, "param": params, "tag": run_tags}


@dataclass(frozen=True)
class LoggedRun:
    """A run with what it logged."""

    run: Run
    metrics: Sequence[MetricPoint]
    params: Mapping[str, str]
    tags: Mapping[str, str]


@dataclass(frozen=True)
class RunPage:
    runs: list[LoggedRun]
    next_page_token: str | None


class RunSearch:
    """Reads runs in a database."""

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
        """Runs of these experiments, the newest first unless `orders` say otherwise."""
        # An offset costs the skipped rows, and shifts when runs are created meanwhile.
        offset = decode_token(page_token, (int,))[0] if page_token else 0
        with reading(self._database, connection) as reader:
            query = select(runs).where(
                runs.c.experiment_id.in_(experiment_ids), runs.c.lifecycle_stage.in_(lifecycle_stages)
            )
            if organization is not None:
                query = query.where(runs.c.organization == organization)
            for condition in conditions:
                query = query.where(_where(condition, reader.dialect.name))
            query = _order(query, orders).limit(limit + 1).offset(max(offset, 0))
            found = [Run(**row) for row in reader.execute(query).mappings()]
            token = encode_token((offset + limit,)) if len(found) > limit else None
            return RunPage(load_data(reader, found[:limit]), token)

    def get(self, run: Run, *, connection: Connection | None = None) -> LoggedRun:
        """What one run logged."""
        with reading(self._database, connection) as reader:
            return load_data(reader, [run])[0]


def load_data(reader: Connection, found: Sequence[Run]) -> list[LoggedRun]:
    """The newest metrics, params and tags of runs, in three queries for each `CHUNK` of them."""
    loaded: list[LoggedRun] = []
    for start in range(0, len(found), CHUNK):
        part = found[start : start + CHUNK]
        ids = [run.id for run in part]
        metrics: dict[str, list[MetricPoint]] = {run.id: [] for run in part}
        query = select(latest_metrics).where(latest_metrics.c.run_id.in_(ids)).order_by(latest_metrics.c.key)
        for row in reader.execute(query):
            metrics[row.run_id].append(MetricPoint(row.key, row.value, row.step, row.timestamp, row.is_nan))
        texts: dict[str, dict[str, dict[str, str]]] = {}
        for name in ("param", "tag"):
            table = KEYED[name]
            texts[name] = {run.id: {} for run in part}
            for run_id, key, value in reader.execute(
                select(table.c.run_id, table.c.key, table.c.value).where(table.c.run_id.in_(ids)).order_by(table.c.key)
            ):
                texts[name][run_id][key] = value
        loaded += [LoggedRun(run, metrics[run.id], texts["param"][run.id], texts["tag"][run.id]) for run in part]
    return loaded


def _where(condition: Condition, dialect: str) -> ColumnElement[bool]:
    if condition.entity == "attribute":
        return compare(runs.c[condition.key], condition.operator, condition.value, dialect)
    table = KEYED[condition.entity]
    return compare_keyed(table, table.c.run_id == runs.c.id, condition, dialect)


def _order(query: Select[Any], orders: Sequence[Order]) -> Select[Any]:
    clauses: list[ColumnElement[Any]] = []
    for order in orders:
        if order.entity == "attribute":
            clauses += ordered(runs.c[order.key], order.ascending)
            continue
        table = KEYED[order.entity].alias()
        query = query.outerjoin(table, (table.c.run_id == runs.c.id) & (table.c.key == order.key))
        is_nan = table.c.is_nan if order.entity == "metric" else None
        clauses += ordered(table.c.value, order.ascending, is_nan)
    return query.order_by(*clauses, runs.c.start_time.desc(), runs.c.id)
