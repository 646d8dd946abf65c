"""Search experiments with MLflow's filters and orders, page by page."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, select

from resources.errors import invalid
from resources.metadata.database import Database
from resources.metadata.field_rules import MAX_INT64, printable
from resources.metadata.filters.pagination import Keyset, SortKey
from resources.metadata.filters.parser import Condition, Grammar, Order
from resources.metadata.filters.sql import compare, compare_keyed
from resources.metadata.tables import experiment_tags, experiments
from resources.metadata.tracking.experiments import Experiment
from resources.metadata.tracking.logged_runs import CHUNK
from resources.metadata.transactions import reading

_NUMBERS = {"creation_time": "creation_time", "last_update_time": "last_update_time"}
_TEXTS = {"name": "name", "experiment_id": "id"}

EXPERIMENT_GRAMMAR = Grammar(
    numbers=_NUMBERS,
    # An experiment id is a number here and a string in MLflow's API.
    texts=_TEXTS,
    entities={
        **dict.fromkeys(("tag", "tags"), "tag"),
        **dict.fromkeys(("attribute", "attributes", "attr"), "attribute"),
    },
    orders={**_NUMBERS, **_TEXTS},
    sortable=frozenset({"attribute"}),
)


@dataclass(frozen=True)
class ExperimentPage:
    experiments: list[Experiment]
    next_page_token: str | None


class ExperimentSearch:
    """Searches the experiments of a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def search(
        self,
        organization: str,
        *,
        conditions: Sequence[Condition] = (),
        orders: Sequence[Order] = (),
        lifecycle_stages: Sequence[str] = ("active",),
        limit: int = 1000,
        page_token: str | None = None,
        connection: Connection | None = None,
    ) -> ExperimentPage:
        """Return an organization's experiments, by default newest first."""
        query = select(experiments).where(
            experiments.c.organization == organization, experiments.c.lifecycle_stage.in_(lifecycle_stages)
        )
        keyset = Keyset(_keys(orders), scope=orders)
        with reading(self._database, connection) as reader:
            for condition in conditions:
                query = query.where(_where(condition, reader.dialect.name))
            rows = reader.execute(keyset.page(query, limit, page_token)).all()
            tags = _tags(reader, [row.id for row in rows[:limit]])
        found = [Experiment(*(*row[: len(experiments.c)], tags[row.id])) for row in rows[:limit]]
        return ExperimentPage(found, keyset.next_token(rows, limit))


def _keys(orders: Sequence[Order]) -> list[SortKey]:
    """Return the sort keys. MLflow breaks ties by largest id, except in its default order."""
    if not orders:
        return [SortKey(experiments.c.creation_time, False, int), SortKey(experiments.c.id, True, int)]
    keys = [SortKey(experiments.c[order.key], order.ascending, str if order.key == "name" else int) for order in orders]
    return [*keys, SortKey(experiments.c.id, False, int)]


def _tags(reader: Connection, ids: Sequence[int]) -> dict[int, dict[str, str]]:
    found: dict[int, dict[str, str]] = {identifier: {} for identifier in ids}
    for start in range(0, len(ids), CHUNK):
        query = select(experiment_tags).where(experiment_tags.c.experiment_id.in_(ids[start : start + CHUNK]))
        for row in reader.execute(query.order_by(experiment_tags.c.key)):
            found[row.experiment_id][row.key] = row.value
    return found


def _where(condition: Condition, dialect: str) -> ColumnElement[bool]:
    if condition.entity != "attribute":
        return compare_keyed(experiment_tags, experiment_tags.c.experiment_id == experiments.c.id, condition, dialect)
    if condition.key != "id":
        return compare(experiments.c[condition.key], condition.operator, condition.value, dialect)
    if condition.operator in ("LIKE", "ILIKE"):
        raise invalid(f"Invalid comparator for experiment_id: {condition.operator}")
    texts = condition.value if isinstance(condition.value, tuple) else (str(condition.value),)
    listed = experiments.c.id.in_(_numbers(texts))
    return listed if condition.operator in ("=", "IN") else ~listed


def _numbers(texts: Sequence[str]) -> list[int]:
    for text in texts:
        if not (text.isascii() and text.isdigit() and len(text) <= 19 and int(text) <= MAX_INT64):
            raise invalid(f"Invalid experiment ID '{printable(text)}'. Experiment ID must be a valid integer.")
    return [int(text) for text in texts]
