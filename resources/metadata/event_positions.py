"""How far a reader of the events is, where no other keeps that for it: a Dagster sensor has a cursor of its own."""

from sqlalchemy import Connection, select

from resources.metadata.tables import event_positions as table
from resources.metadata.transactions import insert_into


def position_of(connection: Connection, reader: str) -> int:
    """The `seq` of the last event that the reader is done with; 0 for a new one."""
    return connection.execute(select(table.c.seq).where(table.c.reader == reader)).scalar_one_or_none() or 0


def move(connection: Connection, reader: str, seq: int) -> None:
    """Note, in the caller's transaction, that the reader is done with all events up to this one. It never goes back."""
    row = insert_into(connection, table).values(reader=reader, seq=seq)
    connection.execute(
        row.on_conflict_do_update(index_elements=["reader"], set_={"seq": seq}, where=table.c.seq < row.excluded.seq)
    )
