"""Heartbeats: when sensors, relay and other services were last active."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import select

from resources.metadata.database import Database
from resources.metadata.outbox import now_ms
from resources.metadata.tables import heartbeats as table
from resources.metadata.transactions import insert_into

SENSORS_NAME = "sensors"
"""Dagster's daemon evaluates the sensors: without it, no job is started and no version is checked."""


@dataclass(frozen=True)
class Heartbeat:
    """The last heartbeat of a service; `beat_at` in milliseconds since 1970."""

    name: str
    beat_at: int


class Heartbeats:
    def __init__(self, database: Database) -> None:
        self._database = database

    def beat(self, name: str) -> None:
        """Record that `name` is active now."""
        values = {"beat_at": now_ms()}
        with self._database.write() as connection:
            row = insert_into(connection, table).values(name=name, **values)
            connection.execute(row.on_conflict_do_update(index_elements=["name"], set_=values))

    def list(self) -> Sequence[Heartbeat]:
        """Return the last heartbeat of each service that ever sent one."""
        with self._database.read() as connection:
            return [Heartbeat(**row) for row in connection.execute(select(table).order_by(table.c.name)).mappings()]
