"""Join the caller's transaction or open one's own, and insert where a row may be there already.

What belongs here: the few lines that every table module would repeat. What does not: any table.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, Dialect, Table
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError

from resources.metadata.database import Database


@contextmanager
def writing(database: Database, connection: Connection | None) -> Iterator[Connection]:
    """The caller's transaction where there is one (the caller commits), else one of our own."""
    if connection is not None:
        yield connection
    else:
        with database.write() as own:
            yield own


@contextmanager
def reading(database: Database, connection: Connection | None) -> Iterator[Connection]:
    """As `writing`, for a transaction that only reads."""
    if connection is not None:
        yield connection
    else:
        with database.read() as own:
            yield own


def insert_into(connection: Connection, table: Table) -> postgresql.Insert | sqlite.Insert:
    """An INSERT that knows ON CONFLICT, in the dialect of the connection."""
    return postgresql.insert(table) if connection.dialect.name == "postgresql" else sqlite.insert(table)


@contextmanager
def driver_errors(dialect: Dialect) -> Iterator[None]:
    """For statements given to the driver itself: its errors become SQLAlchemy's."""
    driver = dialect.loaded_dbapi
    try:
        yield
    except driver.Error as error:
        raise DBAPIError.instance(None, None, error, driver.Error, dialect=dialect) from error
