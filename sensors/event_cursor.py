"""Following the event table: the cursor of a sensor is the `seq` of the last event that it is done with."""

import dagster as dg
from sqlalchemy import Connection

from resources.metadata.outbox import Event, read_after

MAX_EVENTS = 20
"""Per tick: one that launched 50 runs took over a minute, and a tick has 60 seconds."""

INTERVAL_SECONDS = 1
"""The daemon looks at its sensors every 5 seconds at most; this only says that each look counts."""

SELDOM_SECONDS = 15
"""Of what nobody waits for: Dagster's daemon writes down each look several times."""


def position(context: dg.SensorEvaluationContext) -> int:
    """The last event that was dealt with; 0 for a fresh or reset cursor."""
    return int(context.cursor) if context.cursor and context.cursor.isdigit() else 0


def new_events(context: dg.SensorEvaluationContext, connection: Connection, *types: str) -> list[Event]:
    return read_after(connection, position(context), types, MAX_EVENTS)
