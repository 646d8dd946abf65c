"""Finding runs: MLflow's filters and orders over runs, their params, tags, newest metrics and inputs, page by page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, case, select

from resources.metadata.database import Database
from resources.metadata.filter_language import Condition, Grammar, Order
from resources.metadata.filter_sql import compare, compare_keyed
from resources.metadata.inputs import DatasetInput, load_inputs, used_dataset
from resources.metadata.keyset import Keyset, SortKey, absent_last
from resources.metadata.run_models import RunModel, load_run_models
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
        **dict.fromkeys(("dataset", "datasets"), "dataset"),
    },
    orders={**_NUMBERS, **_TEXTS},
    dataset_keys=frozenset({"name", "digest", "context"}),
)
STATUS_ORDER = {status: place for place, status in enumerate(("failed", "completed", "cancelled", "running", "queued"))}
"""Statuses in the alphabetical order of MLflow's words for them: clients order by those."""
KEYED = {"metric": latest_metrics, "param": params, "tag": run_tags}


@dataclass(frozen=True)
class LoggedRun:
    """A run with what it logged."""

    run: Run
    metrics: Sequence[MetricPoint]
    params: Mapping[str, str]
    tags: Mapping[str, str]
    inputs: Sequence[DatasetInput]
    models: Sequence[RunModel]


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
        query = select(runs).where(runs.c.experiment_id.in_(experiment_ids), runs.c.lifecycle_stage.in_(lifecycle_stages))
        if organization is not None:
            query = query.where(runs.c.organization == organization)
        query, keys = _sorted(query, orders)
        keyset = Keyset(keys, scope=orders)
        with reading(self._database, connection) as reader:
            for condition in conditions:
                query = query.where(_where(condition, reader.dialect.name))
            rows = reader.execute(keyset.page(query, limit, page_token)).all()
            found = [Run(*row[: len(runs.c)]) for row in rows[:limit]]
            return RunPage(load_data(reader, found), keyset.next_token(rows, limit))

    def get(self, run: Run, *, connection: Connection | None = None) -> LoggedRun:
        """What one run logged."""
        with reading(self._database, connection) as reader:
            return load_data(reader, [run])[0]


def load_data(reader: Connection, found: Sequence[Run]) -> list[LoggedRun]:
    """What runs logged, in five queries for each `CHUNK` of them."""
    loaded: list[LoggedRun] = []
    for start in range(0, len(found), CHUNK):
        part = found[start : start + CHUNK]
        ids = [run.id for run in part]
        metrics: dict[str, list[MetricPoint]] = {run.id: [] for run in part}
        newest = latest_metrics.c
        query = select(newest.run_id, newest.key, newest.value, newest.step, newest.timestamp, newest.is_nan)
        # Rows all at once and in the order of the index: fetched one by one, they cost more than the search itself.
        rows = reader.execute(query.where(newest.run_id.in_(ids)).order_by(newest.run_id, newest.key)).all()
        for run_id, key, value, step, timestamp, is_nan in rows:
            metrics[run_id].append(MetricPoint(key, value, step, timestamp, is_nan))
        texts: dict[str, dict[str, dict[str, str]]] = {}
        for name in ("param", "tag"):
            columns = KEYED[name].c
            texts[name] = {run.id: {} for run in part}
            pairs = select(columns.run_id, columns.key, columns.value).where(columns.run_id.in_(ids))
            for run_id, key, value in reader.execute(pairs.order_by(columns.run_id, columns.key)).all():
                texts[name][run_id][key] = value
        inputs, models = load_inputs(reader, ids), load_run_models(reader, ids)
        loaded += [
            LoggedRun(run, metrics[run.id], texts["param"][run.id], texts["tag"][run.id], inputs[run.id], models[run.id])
            for run in part
        ]
    return loaded


def _where(condition: Condition, dialect: str) -> ColumnElement[bool]:
    if condition.entity == "attribute":
        return compare(runs.c[condition.key], condition.operator, condition.value, dialect)
    if condition.entity == "dataset":
        return used_dataset(condition, dialect)
    table = KEYED[condition.entity]
    return compare_keyed(table, table.c.run_id == runs.c.id, condition, dialect)


def _sorted(query: Select[Any], orders: Sequence[Order]) -> tuple[Select[Any], list[SortKey]]:
    """The query with what its order needs, and the order. Values are looked up by primary key, run by run."""
    keys: list[SortKey] = []
    for order in orders:
        if (order.entity, order.key) == ("attribute", "status"):
            keys.append(SortKey(case(STATUS_ORDER, value=runs.c.status), order.ascending, int))
            continue
        if order.entity == "attribute":
            kind = int if order.key in _NUMBERS.values() else str
            keys += absent_last(runs.c[order.key], order.ascending, kind)
            continue
        table = KEYED[order.entity].alias()
        query = query.outerjoin(table, (table.c.run_id == runs.c.id) & (table.c.key == order.key))
        metric = order.entity == "metric"
        keys += absent_last(table.c.value, order.ascending, float if metric else str, table.c.is_nan if metric else None)
    return query, [*keys, SortKey(runs.c.start_time, False, int), SortKey(runs.c.id, True, str)]
