"""Metrics of runs: the whole history, and the newest value of each key. Sending a point again changes nothing."""

from dataclasses import dataclass
from operator import attrgetter, le

from sqlalchemy import Connection, select, tuple_

from resources.metadata.database import Database
from resources.metadata.filters.page_token import decode_token, encode_token
from resources.metadata.statements import Statement, parameter
from resources.metadata.tables import latest_metrics, metrics
from resources.metadata.tracking_rules import MetricPoint, checked_text
from resources.metadata.transactions import reading

POINT = (metrics.c.value, metrics.c.step, metrics.c.timestamp, metrics.c.is_nan)
"""A point as `MetricPoint` has it, without its key."""
ORDER = (metrics.c.step, metrics.c.timestamp, metrics.c.value, metrics.c.is_nan)
"""That of the primary key: a page costs what it returns, however long the history is."""

TIME = attrgetter("timestamp", "step", "value", "is_nan")
AFTER = ("step", "timestamp", "value", "is_nan")
_SERIES = Statement(
    select(latest_metrics.c.id).where(
        latest_metrics.c.run_id == parameter("run_id"), latest_metrics.c.key == parameter("key")
    )
)
_PAGE = select(*POINT).where(metrics.c.series == parameter("series")).order_by(*ORDER).limit(parameter("limit"))
_FIRST = Statement(_PAGE)
_LATER = Statement(_PAGE.where(tuple_(*ORDER) > tuple_(*(parameter(name) for name in AFTER))))


@dataclass(frozen=True)
class HistoryPage:
    points: list[MetricPoint]
    next_page_token: str | None


class Metrics:
    """Reads metrics. They are written through `RunData`, which knows whether the run may still be written to."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def latest(self, run_id: str, *, connection: Connection | None = None) -> list[MetricPoint]:
        """The newest point of every key: the largest (step, timestamp, value), as in MLflow."""
        query = select(latest_metrics).where(latest_metrics.c.run_id == run_id).order_by(latest_metrics.c.key)
        with reading(self._database, connection) as reader:
            return [_point(row) for row in reader.execute(query)]

    def history(
        self, run_id: str, key: str, limit: int, page_token: str | None = None, *, connection: Connection | None = None
    ) -> HistoryPage:
        """At most `limit` points of one key, from where the token's page ended.

        Pages follow the steps, and each is in MLflow's order: by time, and for one time by step and value. Both are one
        order where time and steps grew together, as they do but where a run went on from an earlier step.
        """
        checked_text(key, "metric_key")
        position = decode_token(page_token, (int, int, float, bool)) if page_token else []
        after = dict(zip(AFTER, position, strict=False))
        with reading(self._database, connection) as reader:
            found = _SERIES.first(reader, run_id=run_id, key=key)
            statement = _LATER if after else _FIRST
            rows = statement.rows(reader, series=found[0], limit=limit + 1, **after) if found else []
        points = [MetricPoint(key, value, step, time, is_nan == 1) for value, step, time, is_nan in rows]
        if len(points) <= limit:
            return HistoryPage(by_time(points), None)
        last = points[limit - 1]
        return HistoryPage(by_time(points[:limit]), encode_token((last.step, last.timestamp, last.value, last.is_nan)))


def by_time(points: list[MetricPoint]) -> list[MetricPoint]:
    """Points that are in the order of steps."""
    times = [point.timestamp for point in points]
    return points if all(map(le, times, times[1:])) else sorted(points, key=TIME)


def _point(row: object) -> MetricPoint:
    return MetricPoint(*(getattr(row, name) for name in ("key", "value", "step", "timestamp", "is_nan")))
