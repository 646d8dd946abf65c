"""Finding experiments: MLflow's filters and orders over experiments and their tags, page by page."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, select

from resources.metadata.database import Database
from resources.metadata.experiments import Experiment
from resources.metadata.filter_language import Condition, Grammar, Order
from resources.metadata.filter_sql import compare, compare_keyed, ordered
from resources.metadata.page_token import decode_token, encode_token
from resources.metadata.run_search import CHUNK
from resources.metadata.tables import experiment_tags, experiments
from resources.metadata.transactions import reading

_NUMBERS = {"creation_time": "creation_time", "last_update_time": "last_update_time"}
_TEXTS = {"name": "name"}

EXPERIMENT_GRAMMAR = Grammar(
    # An experiment id is a number here and a string in MLflow's API: comparing it is left to get and search runs.
    numbers=_NUMBERS,
    texts=_TEXTS,
    entities={
        **dict.fromkeys(("tag", "tags"), "tag"),
        **dict.fromkeys(("attribute", "attributes", "attr"), "attribute"),
    },
    orders={**_NUMBERS, **_TEXTS, "experiment_id": "id"},
)


@dataclass(frozen=True)
class ExperimentPage:
    experiments: list[Experiment]
    next_page_token: str | None


class ExperimentSearch:
    """Reads experiments in a database."""

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
        """Experiments of an organization, the newest first unless `orders` say otherwise."""
        offset = decode_token(page_token, (int,))[0] if page_token else 0
        query = select(experiments).where(
            experiments.c.organization == organization, experiments.c.lifecycle_stage.in_(lifecycle_stages)
        )
        clauses = [clause for order in orders for clause in ordered(experiments.c[order.key], order.ascending)]
        query = query.order_by(*clauses, experiments.c.creation_time.desc(), experiments.c.id)
        with reading(self._database, connection) as reader:
            for condition in conditions:
                query = query.where(_where(condition, reader.dialect.name))
            rows = reader.execute(query.limit(limit + 1).offset(max(offset, 0))).mappings().all()
            tags = _tags(reader, [row["id"] for row in rows[:limit]])
        token = encode_token((offset + limit,)) if len(rows) > limit else None
        return ExperimentPage([Experiment(**row, tags=tags[row["id"]]) for row in rows[:limit]], token)


def _tags(reader: Connection, ids: Sequence[int]) -> dict[int, dict[str, str]]:
    found: dict[int, dict[str, str]] = {identifier: {} for identifier in ids}
    for start in range(0, len(ids), CHUNK):
        query = select(experiment_tags).where(experiment_tags.c.experiment_id.in_(ids[start : start + CHUNK]))
        for row in reader.execute(query.order_by(experiment_tags.c.key)):
            found[row.experiment_id][row.key] = row.value
    return found


def _where(condition: Condition, dialect: str) -> ColumnElement[bool]:
    if condition.entity == "attribute":
        return compare(experiments.c[condition.key], condition.operator, condition.value, dialect)
    return compare_keyed(experiment_tags, experiment_tags.c.experiment_id == experiments.c.id, condition, dialect)
