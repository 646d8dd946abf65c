"""Following the event table: the cursor of a sensor has the `seq` of the last event that it is done with.

A database that is put back to an earlier day, from a backup, gives its numbers a second time. A cursor that was a number
alone passed over as many new events: no job that ended was evaluated, and no promotion deployed. So it names the newest
event that there was, too: that one is not there any more.
"""

from dataclasses import dataclass, replace

import dagster as dg
from sqlalchemy import Connection

from resources.metadata.outbox import Event, newest, read_after, time_of

MAX_EVENTS = 20
"""Per tick: one that launched 50 runs took over a minute, and a tick has 60 seconds."""

INTERVAL_SECONDS = 1
"""The daemon looks at its sensors every 5 seconds at most; this only says that each look counts."""

SELDOM_SECONDS = 15
"""Of what nobody waits for: Dagster's daemon writes down each look several times."""


@dataclass(frozen=True)
class Position:
    """The last event that was dealt with, the newest that there was and its time, and how often the database was put back
    to a day before that.
    """

    seq: int = 0
    newest: int = 0
    newest_at: int = 0
    put_back: int = 0

    def after(self, event: Event) -> "Position":
        return replace(self, seq=event.seq)

    def run_key(self, key: str) -> str:
        """Dagster runs a key once. What a database that was put back does not know of is to be done once more."""
        return f"{key}-again-{self.put_back}" if self.put_back else key

    def __str__(self) -> str:
        return f"{self.seq}/{self.newest}/{self.newest_at}/{self.put_back}"


def position(context: dg.SensorEvaluationContext, connection: Connection) -> Position:
    """Where to go on; before the first event with a fresh or reset cursor, and where the database was put back: of what was
    done with them it tells, as far as it knows.
    """
    numbers = (context.cursor or "").split("/")
    known = Position(*map(int, numbers)) if all(number.isdigit() for number in numbers) else Position()
    # A cursor of a release before this one is a number alone.
    if known.newest and time_of(connection, known.newest) != known.newest_at:
        known = Position(put_back=known.put_back + 1)
    seq, created_at = newest(connection)
    return replace(known, newest=seq, newest_at=created_at)


def new_events(position: Position, connection: Connection, *types: str) -> list[Event]:
    return read_after(connection, position.seq, types, MAX_EVENTS)
