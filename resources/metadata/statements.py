"""Statements that are asked all day: written with SQLAlchemy once, then given to the driver itself.

For a query of one small row, what SQLAlchemy does for each execution costs several times what the database does.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import BindParameter, Connection, Select, bindparam

from resources.metadata.transactions import driver_errors

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
        return fetched(reader, text, bound if places is None else [bound[name] for name in places])

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


def fetched(reader: Connection, text: str, values: Mapping[str, Any] | Sequence[Any]) -> list[Row]:
    """All rows of a statement in the words of the driver, at once: fetched one by one, they cost more than the search."""
    driver: Any = reader.connection.driver_connection
    found: list[Row]
    with driver_errors(reader.dialect):
        if reader.dialect.name == "postgresql":
            found = driver.cursor(binary=True).execute(text, values).fetchall()
        else:
            found = driver.execute(text, values).fetchall()
    return found
