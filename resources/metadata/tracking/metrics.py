"""Metric histories of runs: newest values, pages, and samples for charts."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter, le

from sqlalchemy import ColumnElement, Connection, and_, func, or_, select, tuple_

from resources.metadata.database import Database
from resources.metadata.field_rules import MetricPoint, checked_text
from resources.metadata.filters.pagination import decode_token, encode_token
from resources.metadata.tables import latest_metrics, metrics
from resources.metadata.transactions import Statement, parameter, reading

# Metrics of runs: the whole history, and the newest value of each key. Writing a point is idempotent.

POINT_COLUMNS = (metrics.c.value, metrics.c.step, metrics.c.timestamp, metrics.c.is_nan)
"""The columns of a `MetricPoint` without its key."""
HISTORY_ORDER = (metrics.c.step, metrics.c.timestamp, metrics.c.value, metrics.c.is_nan)
"""The order of the primary key: a page costs only what it returns, regardless of the history's length."""

TIME_KEY = attrgetter("timestamp", "step", "value", "is_nan")
POSITION_FIELDS = ("step", "timestamp", "value", "is_nan")
_SERIES = Statement(
    select(latest_metrics.c.id).where(
        latest_metrics.c.run_id == parameter("run_id"), latest_metrics.c.key == parameter("key")
    )
)
_PAGE = (
    select(*POINT_COLUMNS).where(metrics.c.series == parameter("series")).order_by(*HISTORY_ORDER).limit(parameter("limit"))
)
_FIRST = Statement(_PAGE)
_LATER = Statement(_PAGE.where(tuple_(*HISTORY_ORDER) > tuple_(*(parameter(name) for name in POSITION_FIELDS))))


@dataclass(frozen=True)
class HistoryPage:
    points: list[MetricPoint]
    next_page_token: str | None


class Metrics:
    """Reads metrics. `RunData` writes them, after checking that the run is active."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def latest(self, run_id: str, *, connection: Connection | None = None) -> list[MetricPoint]:
        """Return the newest point of every key: the largest (step, timestamp, value), as in MLflow."""
        query = select(latest_metrics).where(latest_metrics.c.run_id == run_id).order_by(latest_metrics.c.key)
        with reading(self._database, connection) as reader:
            return [_point(row) for row in reader.execute(query)]

    def history(
        self, run_id: str, key: str, limit: int, page_token: str | None = None, *, connection: Connection | None = None
    ) -> HistoryPage:
        """Return at most `limit` points of one key, after the previous page.

        Pages are in the order of steps; within a page, the order is MLflow's: by time, then step and value. Both orders are
        equal if time and steps grew together, which only fails if a run resumed from an earlier step.
        """
        checked_text(key, "metric_key")
        position = decode_token(page_token, (int, int, float, bool)) if page_token else []
        after = dict(zip(POSITION_FIELDS, position, strict=False))
        with reading(self._database, connection) as reader:
            found = _SERIES.first(reader, run_id=run_id, key=key)
            statement = _LATER if after else _FIRST
            rows = statement.rows(reader, series=found[0], limit=limit + 1, **after) if found else []
        points = [MetricPoint(key, value, step, time, is_nan == 1) for value, step, time, is_nan in rows]
        if len(points) <= limit:
            return HistoryPage(sort_by_time(points), None)
        last = points[limit - 1]
        return HistoryPage(sort_by_time(points[:limit]), encode_token((last.step, last.timestamp, last.value, last.is_nan)))


def sort_by_time(points: list[MetricPoint]) -> list[MetricPoint]:
    """Sort points that are in the order of steps by time."""
    times = [point.timestamp for point in points]
    return points if all(map(le, times, times[1:])) else sorted(points, key=TIME_KEY)


def _point(row: object) -> MetricPoint:
    return MetricPoint(*(getattr(row, name) for name in ("key", "value", "step", "timestamp", "is_nan")))


# Sample a metric's history for a chart: at most `limit` points per run, evenly spread, including the first and the last.
#
# Source: `get_metric_history_bulk_interval` of MLflow 3.17: the history is cut into `limit` parts, as by NTILE, and the
# first point of each part is taken. These rows depend only on their number, so the database counts and returns no others.

STEP_ORDER = (metrics.c.step, metrics.c.timestamp, metrics.c.value, metrics.c.is_nan)
"""The order of the primary key, which needs no sorting, and of samples."""


@dataclass(frozen=True)
class StepRange:
    """A closed interval of steps."""

    first: int
    last: int


@dataclass(frozen=True)
class RunPoint:
    run_id: str
    point: MetricPoint


class MetricSampling:
    """Samples metric histories in a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def sample(
        self,
        run_ids: Sequence[str],
        key: str,
        limit: int,
        steps: StepRange | None = None,
    ) -> list[RunPoint]:
        """Return at most `limit` points of each run, in the order of `run_ids` and steps."""
        checked_text(key, "metric_key")
        with self._database.read() as reader:
            return [
                RunPoint(run_id, point)
                for run_id in run_ids
                for point in _sample(reader, checked_text(run_id, "run_ids"), key, limit, steps)
            ]

    def first_points(self, run_ids: Sequence[str], key: str, limit: int) -> list[RunPoint]:
        """Return at most `limit` points of all runs together, by run and time (`get-history-bulk`)."""
        ids = [checked_text(run_id, "run_id") for run_id in run_ids]
        query = (
            select(latest_metrics.c.run_id, *POINT_COLUMNS)
            .join(metrics, metrics.c.series == latest_metrics.c.id)
            .where(latest_metrics.c.run_id.in_(ids), latest_metrics.c.key == checked_text(key, "metric_key"))
            .order_by(latest_metrics.c.run_id, metrics.c.timestamp, metrics.c.step, metrics.c.value, metrics.c.is_nan)
            .limit(limit)
        )
        with self._database.read() as reader:
            return [RunPoint(run_id, MetricPoint(key, *point)) for run_id, *point in reader.execute(query)]


def _sample(reader: Connection, run_id: str, key: str, limit: int, steps: StepRange | None) -> list[MetricPoint]:
    named = select(latest_metrics.c.id).where(latest_metrics.c.run_id == run_id, latest_metrics.c.key == key)
    number = reader.execute(named).scalar()
    if number is None:
        return []
    series: ColumnElement[bool] = metrics.c.series == number
    if steps is not None:
        series = and_(series, metrics.c.step.between(steps.first, steps.last))
    count: int = reader.execute(select(func.count()).select_from(metrics).where(series)).scalar_one()
    if count <= limit:
        whole = select(*POINT_COLUMNS).where(series).order_by(*STEP_ORDER)
        return [MetricPoint(key, *row) for row in reader.execute(whole)]
    place = (func.row_number().over(order_by=STEP_ORDER) - 1).label("place")
    numbered = select(*POINT_COLUMNS, place).where(series).subquery()
    chosen = select(*list(numbered.c)[: len(POINT_COLUMNS)]).where(_begins_part(numbered.c.place, count, limit))
    points = [MetricPoint(key, *row) for row in reader.execute(chosen.order_by(numbered.c.place))]
    newest = select(*POINT_COLUMNS).where(series).order_by(*(column.desc() for column in STEP_ORDER)).limit(1)
    # The last part begins before the last point, which matters most to readers.
    return [*points[:-1], MetricPoint(key, *reader.execute(newest).one())]


def _begins_part(place: ColumnElement[int], count: int, parts: int) -> ColumnElement[bool]:
    """Return whether the row at `place` begins one of `parts` parts.

    The first `count % parts` parts are longer by one row.
    """
    size, longer = divmod(count, parts)
    border = longer * (size + 1)
    return or_(
        and_(place < border, place % (size + 1) == 0),
        and_(place >= border, (place - border) % size == 0),
    )
