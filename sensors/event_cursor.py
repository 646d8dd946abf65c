"""Following the event table: the cursor of a sensor names the last event that it is done with.

A database that is put back to an earlier day, from a backup, gives its numbers a second time. A cursor that was a number
alone passed over as many new events: no job that ended was evaluated, and no promotion deployed.
"""

from dataclasses import dataclass, replace

import dagster as dg
from sqlalchemy import Connection

from resources.metadata.outbox import Event, read_after, time_of

MAX_EVENTS = 20
"""Per tick: one that launched 50 runs took over a minute, and a tick has 60 seconds."""

INTERVAL_SECONDS = 1
"""The daemon looks at its sensors every 5 seconds at most; this only says that each look counts."""

SELDOM_SECONDS = 15
"""Of what nobody waits for: Dagster's daemon writes down each look several times."""


@dataclass(frozen=True)
class Position:
    """The last event that was dealt with, its time, and how often the database was put back to a day before it."""

    seq: int = 0
    created_at: int = 0
    put_back: int = 0

    def after(self, event: Event) -> "Position":
        return replace(self, seq=event.seq, created_at=event.created_at)

    def run_key(self, key: str) -> str:
        """Dagster runs a key once. What a database that was put back does not know of is to be done once more."""
        return f"{key}-again-{self.put_back}" if self.put_back else key

    def __str__(self) -> str:
        return f"{self.seq}/{self.created_at}/{self.put_back}"


def position(context: dg.SensorEvaluationContext, connection: Connection) -> Position:
    """Before the first event where the cursor is fresh or reset, or names one that is not there: of what was done with them
    the database tells, as far as it knows.
    """
    numbers = (context.cursor or "").split("/")
    known = Position(*map(int, numbers)) if all(number.isdigit() for number in numbers) else Position()
    told_at = time_of(connection, known.seq)
    # Cursors of a release before this one are a number alone.
    is_there = told_at is not None and known.created_at in (0, told_at)
    return known if is_there or known.seq == 0 else Position(put_back=known.put_back + 1)


def new_events(position: Position, connection: Connection, *types: str) -> list[Event]:
    return read_after(connection, position.seq, types, MAX_EVENTS)
