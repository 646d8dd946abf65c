"""Join transactions, insert idempotently, and run precompiled statements."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import BindParameter, Connection, Dialect, Select, Table, bindparam
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError

from resources.metadata.database import Database

# Join the caller's transaction or open one, and insert rows that may exist already.
#
# For the few lines that every table module would repeat. Nothing here depends on a table.


@contextmanager
def writing(database: Database, connection: Connection | None) -> Iterator[Connection]:
    """Yield the caller's transaction (the caller commits), or else a new one."""
    if connection is not None:
        yield connection
    else:
        with database.write() as own:
            yield own


@contextmanager
def reading(database: Database, connection: Connection | None) -> Iterator[Connection]:
    """Yield the caller's connection, or else a new one that only reads."""
    if connection is not None:
        yield connection
    else:
        with database.read() as own:
            yield own


def insert_into(connection: Connection, table: Table) -> postgresql.Insert | sqlite.Insert:
    """Return an INSERT of the connection's dialect, which supports ON CONFLICT."""
    return postgresql.insert(table) if connection.dialect.name == "postgresql" else sqlite.insert(table)


@contextmanager
def driver_errors(dialect: Dialect) -> Iterator[None]:
    """Convert driver errors of raw statements to SQLAlchemy's."""
    driver = dialect.loaded_dbapi
    try:
        yield
    except driver.Error as error:
        raise DBAPIError.instance(None, None, error, driver.Error, dialect=dialect) from error


# Frequent statements: written with SQLAlchemy once, then executed by the driver directly.
#
# For a query of one small row, SQLAlchemy's overhead per execution is several times the database's work.

Row = tuple[Any, ...]


def parameter(name: str) -> BindParameter[Any]:
    """Return a placeholder for a value that is bound at each execution."""
    return bindparam(name, required=False)


class Statement:
    """A precompiled SELECT with `parameter`s.

    Rows are the driver's: a boolean in SQLite is 0 or 1.
    """

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
        # SQLAlchemy's conversions before the driver: for example, SQLite needs a JSON key as a path.
        prepare = compiled._bind_processors
        constants = {
            name: prepare[name](value) if name in prepare else value
            for name, value in compiled.params.items()
            if value is not None
        }
        found = self._compiled[reader.dialect.name] = str(compiled), constants, compiled.positiontup
        return found


def fetch_rows(reader: Connection, text: str, values: Mapping[str, Any] | Sequence[Any]) -> list[Row]:
    """Fetch all rows of a raw statement at once: cheaper than one by one."""
    driver: Any = reader.connection.driver_connection
    found: list[Row]
    with driver_errors(reader.dialect):
        if reader.dialect.name == "postgresql":
            found = driver.cursor(binary=True).execute(text, values).fetchall()
        else:
            found = driver.execute(text, values).fetchall()
    return found
