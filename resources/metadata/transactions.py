"""Join transactions, insert idempotently, and run precompiled statements."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import BindParameter, Connection, Dialect, Select, Table, bindparam
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError

from resources.metadata.database import Database

# Join the caller's transaction or open one's own, and insert where a row may be there already.
#
# What belongs here: the few lines that every table module would repeat. What does not: any table.


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


# Statements that are asked all day: written with SQLAlchemy once, then given to the driver itself.
#
# For a query of one small row, what SQLAlchemy does for each execution costs several times what the database does.

Row = tuple[Any, ...]


def parameter(name: str) -> BindParameter[Any]:
    """A value that each execution gives."""
    return bindparam(name, required=False)


class Statement:
    """A SELECT whose `parameter`s are given at each execution. Rows are the driver's own: a boolean of SQLite is 0 or 1."""

    def __init__(self, query: Select[Any]) -> None:
        self._query = query
        self._compiled: dict[str, tuple[str, dict[str, Any], list[str] | None]] = {}

    def rows(self, reader: Connection, **values: Any) -> list[Row]:
        text, constants, places = self._compiled.get(reader.dialect.name) or self._compile(reader)
        bound = {**constants, **values}
        return fetch_rows(reader, text, bound if places is None else [bound[name] for name in places])

    def first(self, reader: Connection, **values: Any) -> Row | None:
        rows = self.rows(reader, **values)
        return rows[0] if rows else None

    def _compile(self, reader: Connection) -> tuple[str, dict[str, Any], list[str] | None]:
        compiled: Any = self._query.compile(dialect=reader.dialect, compile_kwargs={"render_postcompile": True})
        # What SQLAlchemy would do to a value before the driver gets it: SQLite wants a JSON key as a path, for one.
        prepare = compiled._bind_processors
        constants = {
            name: prepare[name](value) if name in prepare else value
            for name, value in compiled.params.items()
            if value is not None
        }
        found = self._compiled[reader.dialect.name] = str(compiled), constants, compiled.positiontup
        return found


def fetch_rows(reader: Connection, text: str, values: Mapping[str, Any] | Sequence[Any]) -> list[Row]:
    """All rows of a statement in the words of the driver, at once: fetched one by one, they cost more than the search."""
    driver: Any = reader.connection.driver_connection
    found: list[Row]
    with driver_errors(reader.dialect):
        if reader.dialect.name == "postgresql":
            found = driver.cursor(binary=True).execute(text, values).fetchall()
        else:
            found = driver.execute(text, values).fetchall()
    return found
