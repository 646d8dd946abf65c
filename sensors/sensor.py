"""Define sensors, and follow the event table with a restore-safe cursor."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import dagster as dg
from sqlalchemy import Connection

from hanzo_ml_assets.control_plane import ControlPlane
from resources.metadata.outbox import Event, event_time, newest_event, read_after

MAX_EVENTS_PER_TICK = 20
"""Limit per tick: launching 50 runs took over a minute, and a tick may take 60 seconds."""

INTERVAL_SECONDS = 1
"""Evaluate at every daemon pass, which comes at most every 5 seconds."""

SLOW_INTERVAL_SECONDS = 15
"""For work that no user waits for: the Dagster daemon writes several rows per tick."""


@dataclass(frozen=True)
class EventCursor:
    """Position in the event table, with what detects that the database was restored.

    `seq` is the last event handled, `newest` and `newest_at` the newest event seen, `restores` how often it was restored.
    """

    seq: int = 0
    newest: int = 0
    newest_at: int = 0
    restores: int = 0

    def after(self, event: Event) -> "EventCursor":
        return replace(self, seq=event.seq)

    def run_key(self, key: str) -> str:
        """Return the run key; distinct after each restore, so that lost work is redone."""
        return f"{key}-again-{self.restores}" if self.restores else key

    def __str__(self) -> str:
        return f"{self.seq}/{self.newest}/{self.newest_at}/{self.restores}"


def read_cursor(context: dg.SensorEvaluationContext, connection: Connection) -> EventCursor:
    """Return the position to resume from.

    It is the beginning for a fresh cursor or a restored database. Reading events again is safe, because the state that they
    led to is checked.
    """
    numbers = (context.cursor or "").split("/")
    cursor = EventCursor(*map(int, numbers)) if all(number.isdigit() for number in numbers) else EventCursor()
    # A cursor of an earlier release is a single number.
    if cursor.newest and event_time(connection, cursor.newest) != cursor.newest_at:
        cursor = EventCursor(restores=cursor.restores + 1)
    seq, created_at = newest_event(connection)
    return replace(cursor, newest=seq, newest_at=created_at)


def read_new_events(position: EventCursor, connection: Connection, *types: str) -> list[Event]:
    return read_after(connection, position.seq, types, MAX_EVENTS_PER_TICK)


SensorFunction = Callable[[dg.SensorEvaluationContext, ControlPlane], dg.SensorResult]


@dataclass(frozen=True)
class Sensor:
    """A sensor made by `sensor`. `interval` is in seconds."""

    function: SensorFunction
    interval: int
    description: str
    requests_runs: bool

    @property
    def name(self) -> str:
        return self.function.__name__

    def on(self, control_plane: ControlPlane) -> dg.SensorDefinition:
        """Return the Dagster definition, whose evaluations share `control_plane`."""

        def evaluate(context: dg.SensorEvaluationContext) -> dg.SensorResult:
            return self.function(context, control_plane)

        return dg.SensorDefinition(
            name=self.name,
            evaluation_fn=evaluate,
            minimum_interval_seconds=self.interval,
            description=self.description,
            asset_selection=dg.AssetSelection.all() if self.requests_runs else None,
            default_status=dg.DefaultSensorStatus.RUNNING,
        )


def sensor(*, interval: int, description: str, requests_runs: bool = True) -> Callable[[SensorFunction], Sensor]:
    """Return a decorator that makes a sensor named after the function."""
    return lambda function: Sensor(function, interval, description, requests_runs)
