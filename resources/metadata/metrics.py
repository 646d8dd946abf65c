"""Metrics of runs: the whole history, and the newest value of each key. Sending a point again changes nothing."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, select, tuple_

from resources.metadata.database import Database
from resources.metadata.page_token import decode_token, encode_token
from resources.metadata.tables import latest_metrics, metrics
from resources.metadata.tracking_rules import MetricPoint, checked_text
from resources.metadata.transactions import insert_into, reading

ORDER = (metrics.c.step, metrics.c.timestamp, metrics.c.value, metrics.c.is_nan)


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
        """At most `limit` points of one key in the order of steps, from where the token's page ended."""
        query = select(metrics).where(metrics.c.run_id == run_id, metrics.c.key == checked_text(key, "metric_key"))
        if page_token:
            query = query.where(tuple_(*ORDER) > tuple_(*decode_token(page_token, (int, int, float, bool))))
        with reading(self._database, connection) as reader:
            points = [_point(row) for row in reader.execute(query.order_by(*ORDER).limit(limit + 1))]
        if len(points) <= limit:
            return HistoryPage(points, None)
        last = points[limit - 1]
        return HistoryPage(points[:limit], encode_token((last.step, last.timestamp, last.value, last.is_nan)))


def write_points(writer: Connection, run_id: str, points: Sequence[MetricPoint]) -> None:
    """Add points to the history and move the newest value of each key forward, never back."""
    if not points:
        return
    writer.execute(insert_into(writer, metrics).on_conflict_do_nothing(), [_row(run_id, point) for point in points])
    statement = insert_into(writer, latest_metrics)
    new, old = statement.excluded, latest_metrics.c
    newest = ("step", "timestamp", "value", "is_nan")
    upsert = statement.on_conflict_do_update(
        index_elements=["run_id", "key"],
        set_={name: new[name] for name in newest},
        where=tuple_(new.step, new.timestamp, new.value) > tuple_(old.step, old.timestamp, old.value),
    )
    writer.execute(upsert, [_row(run_id, point) for point in newest_of_each(points)])


def newest_of_each(points: Iterable[MetricPoint]) -> list[MetricPoint]:
    """The newest point of each key, sorted by key: writers that lock rows in one order cannot wait for each other."""
    newest: dict[str, MetricPoint] = {}
    for point in points:
        best = newest.get(point.key)
        if best is None or _age(point) > _age(best):
            newest[point.key] = point
    return [newest[key] for key in sorted(newest)]


def _age(point: MetricPoint) -> tuple[int, int, float]:
    return point.step, point.timestamp, point.value


def _row(run_id: str, point: MetricPoint) -> dict[str, object]:
    return {"run_id": run_id, **vars(point)}


def _point(row: object) -> MetricPoint:
    return MetricPoint(*(getattr(row, name) for name in ("key", "value", "step", "timestamp", "is_nan")))
