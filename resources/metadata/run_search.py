"""Finding runs: MLflow's filters and orders over runs, their params, tags, newest metrics and inputs, page by page."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, case, select

from resources.metadata.database import Database
from resources.metadata.filter_language import Condition, Grammar, Order
from resources.metadata.filter_sql import compare, compare_keyed
from resources.metadata.inputs import used_dataset
from resources.metadata.keyset import Keyset, SortKey, absent_last
from resources.metadata.logged_runs import LoggedRun, load_logged
from resources.metadata.run_states import Run
from resources.metadata.tables import latest_metrics, params, run_tags, runs
from resources.metadata.transactions import reading

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
            return RunPage(load_logged(reader, found), keyset.next_token(rows, limit))

    def get(self, run: Run, *, connection: Connection | None = None) -> LoggedRun:
        """What one run logged."""
        with reading(self._database, connection) as reader:
            return load_logged(reader, [run])[0]


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
