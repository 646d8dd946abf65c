"""Define sensors, and follow the event table with a restore-safe cursor."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import dagster as dg
from sqlalchemy import Connection

from hanzo_ml_assets.control_plane import ControlPlane
from resources.metadata.outbox import Event, event_time, newest_event, read_after

MAX_EVENTS_PER_TICK = 20
"""Per tick: one that launched 50 runs took over a minute, and a tick has 60 seconds."""

INTERVAL_SECONDS = 1
"""The daemon looks at its sensors every 5 seconds at most; this only says that each look counts."""

SLOW_INTERVAL_SECONDS = 15
"""Of what nobody waits for: Dagster's daemon writes down each look several times."""


@dataclass(frozen=True)
class EventCursor:
    """The last event that was dealt with, the newest that there was and its time, and how often the database was put back
    to a day before that.
    """

    seq: int = 0
    newest: int = 0
    newest_at: int = 0
    restores: int = 0

    def after(self, event: Event) -> "EventCursor":
        return replace(self, seq=event.seq)

    def run_key(self, key: str) -> str:
        """Dagster runs a key once. What a database that was put back does not know of is to be done once more."""
        return f"{key}-again-{self.restores}" if self.restores else key

    def __str__(self) -> str:
        return f"{self.seq}/{self.newest}/{self.newest_at}/{self.restores}"


def read_cursor(context: dg.SensorEvaluationContext, connection: Connection) -> EventCursor:
    """Where to go on; before the first event with a fresh or reset cursor, and where the database was put back: of what was
    done with them it tells, as far as it knows.
    """
    numbers = (context.cursor or "").split("/")
    cursor = EventCursor(*map(int, numbers)) if all(number.isdigit() for number in numbers) else EventCursor()
    # A cursor of a release before this one is a number alone.
    if cursor.newest and event_time(connection, cursor.newest) != cursor.newest_at:
        cursor = EventCursor(restores=cursor.restores + 1)
    seq, created_at = newest_event(connection)
    return replace(cursor, newest=seq, newest_at=created_at)


def read_new_events(position: EventCursor, connection: Connection, *types: str) -> list[Event]:
    return read_after(connection, position.seq, types, MAX_EVENTS_PER_TICK)


SensorFunction = Callable[[dg.SensorEvaluationContext, ControlPlane], dg.SensorResult]


@dataclass(frozen=True)
class Sensor:
    """What `sensor` makes of a look. `interval` in seconds; with `requests_runs`, it may ask for runs of any asset."""

    function: SensorFunction
    interval: int
    description: str
    requests_runs: bool

    @property
    def name(self) -> str:
        return self.function.__name__

    def on(self, control_plane: ControlPlane) -> dg.SensorDefinition:
        """As Dagster knows it; it keeps the control plane between its looks."""

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
    """Makes a sensor of a function of that name."""
    return lambda function: Sensor(function, interval, description, requests_runs)
