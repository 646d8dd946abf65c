"""Heartbeats: when sensors, relay and other services were last at work."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import select

from resources.metadata.database import Database
from resources.metadata.outbox import now_ms
from resources.metadata.tables import heartbeats as table
from resources.metadata.transactions import insert_into

SENSORS_NAME = "sensors"
"""Dagster's daemon looks at the sensors: without it, no job is started and no version is checked."""


@dataclass(frozen=True)
class Heartbeat:
    """`beat_at` in milliseconds."""

    name: str
    beat_at: int


class Heartbeats:
    def __init__(self, database: Database) -> None:
        self._database = database

    def beat(self, name: str) -> None:
        """Say that `name` is at work now."""
        values = {"beat_at": now_ms()}
        with self._database.write() as connection:
            row = insert_into(connection, table).values(name=name, **values)
            connection.execute(row.on_conflict_do_update(index_elements=["name"], set_=values))

    def list(self) -> Sequence[Heartbeat]:
        """Everybody who was ever heard, and when last."""
        with self._database.read() as connection:
            return [Heartbeat(**row) for row in connection.execute(select(table).order_by(table.c.name)).mappings()]
