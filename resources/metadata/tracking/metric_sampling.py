"""A metric's history for a chart: at most so many points of a run, evenly spread, the first and the last among them.

Source: `get_metric_history_bulk_interval` of MLflow 3.17: the history is cut into `limit` parts as NTILE does, and the first
point of each part is taken. Which rows those are follows from their number alone, so the database counts, and sends no
others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, and_, func, or_, select

from resources.metadata.database import Database
from resources.metadata.tables import latest_metrics, metrics
from resources.metadata.tracking_rules import MetricPoint, checked_text

BY_STEP = (metrics.c.step, metrics.c.timestamp, metrics.c.value, metrics.c.is_nan)
"""The order of the primary key: the database reads it off, without sorting."""
POINT = (metrics.c.value, metrics.c.step, metrics.c.timestamp, metrics.c.is_nan)
"""A point as `MetricPoint` has it, without its key."""


@dataclass(frozen=True)
class Steps:
    """An interval of steps, both ends in it."""

    first: int
    last: int


@dataclass(frozen=True)
class PointOfRun:
    run_id: str
    point: MetricPoint


class MetricSampling:
    """Reads samples of histories in a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def sample(
        self,
        run_ids: Sequence[str],
        key: str,
        limit: int,
        steps: Steps | None = None,
    ) -> list[PointOfRun]:
        """At most `limit` points of each run, run by run as they were asked for, in the order of steps."""
        checked_text(key, "metric_key")
        with self._database.read() as reader:
            return [
                PointOfRun(run_id, point)
                for run_id in run_ids
                for point in _sample(reader, checked_text(run_id, "run_ids"), key, limit, steps)
            ]

    def first_points(self, run_ids: Sequence[str], key: str, limit: int) -> list[PointOfRun]:
        """At most `limit` points of all these runs together, by run and time (`get-history-bulk`)."""
        ids = [checked_text(run_id, "run_id") for run_id in run_ids]
        query = (
            select(latest_metrics.c.run_id, *POINT)
            .join(metrics, metrics.c.series == latest_metrics.c.id)
            .where(latest_metrics.c.run_id.in_(ids), latest_metrics.c.key == checked_text(key, "metric_key"))
            .order_by(latest_metrics.c.run_id, metrics.c.timestamp, metrics.c.step, metrics.c.value, metrics.c.is_nan)
            .limit(limit)
        )
        with self._database.read() as reader:
            return [PointOfRun(run_id, MetricPoint(key, *point)) for run_id, *point in reader.execute(query)]


def _sample(reader: Connection, run_id: str, key: str, limit: int, steps: Steps | None) -> list[MetricPoint]:
    named = select(latest_metrics.c.id).where(latest_metrics.c.run_id == run_id, latest_metrics.c.key == key)
    number = reader.execute(named).scalar()
    if number is None:
        return []
    series: ColumnElement[bool] = metrics.c.series == number
    if steps is not None:
        series = and_(series, metrics.c.step.between(steps.first, steps.last))
    count: int = reader.execute(select(func.count()).select_from(metrics).where(series)).scalar_one()
    if count <= limit:
        whole = select(*POINT).where(series).order_by(*BY_STEP)
        return [MetricPoint(key, *row) for row in reader.execute(whole)]
    place = (func.row_number().over(order_by=BY_STEP) - 1).label("place")
    numbered = select(*POINT, place).where(series).subquery()
    chosen = select(*list(numbered.c)[: len(POINT)]).where(_begins_part(numbered.c.place, count, limit))
    points = [MetricPoint(key, *row) for row in reader.execute(chosen.order_by(numbered.c.place))]
    newest = select(*POINT).where(series).order_by(*(column.desc() for column in BY_STEP)).limit(1)
    # The last part begins before the last point, which is the one that people look at.
    return [*points[:-1], MetricPoint(key, *reader.execute(newest).one())]


def _begins_part(place: ColumnElement[int], count: int, parts: int) -> ColumnElement[bool]:
    """Whether the row at `place` begins one of `parts` parts: the first `count % parts` of them are longer by one row."""
    size, longer = divmod(count, parts)
    border = longer * (size + 1)
    return or_(
        and_(place < border, place % (size + 1) == 0),
        and_(place >= border, (place - border) % size == 0),
    )
