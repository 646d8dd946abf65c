"""The rows of a SQL query as JSON lines: read where the database can be reached, and never by a statement that writes.

Of SQLite and PostgreSQL. Values are in the forms that datasets have for those of Arrow (`resources.ingest.column_values`):
decimals, dates and times are texts, binary values base64.
"""

import math
import re
import sqlite3
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from typing import Any, TypeAlias
from urllib.parse import quote, unquote, urlsplit

import msgspec

ROWS = 1000
PASSWORD = re.compile(r"(?<=://)[^\s/]*(?=@)")
"""In an address, with the name before it. libpq repeats an address that it cannot read."""
Block: TypeAlias = tuple[list[str], Sequence[Sequence[Any]]]
"""Names of the columns, and some rows."""


class BadQuery(Exception):
    """The database or the query is no good; the message is one line without any password."""


def query_lines(database: str, statement: str) -> Iterator[bytes]:
    """The rows of a statement, in blocks of lines.

    Args:
        database: `sqlite:///FILE` or `postgresql://USER:PASSWORD@HOST/NAME`.
    """
    if not database.isprintable() or not is_text(statement):
        raise BadQuery("the query, or the address of the database, holds what is no text in UTF-8: correct it")
    scheme = database.partition(":")[0]
    if scheme == "sqlite":
        tables = sqlite_rows(database, statement)
    elif scheme in ("postgresql", "postgres"):
        tables = postgresql_rows(database, statement)
    else:
        raise BadQuery("no database that can be read: give --database sqlite:///FILE or postgresql://USER@HOST/NAME")
    is_empty = True
    with closing(tables):  # what is refused leaves no connection open for as long as somebody holds the refusal
        for names, rows in tables:
            is_empty = False
            if double := next((name for name in names if names.count(name) > 1), None):
                raise BadQuery(f"two columns of the query are called '{double}': rename one with AS")
            yield b"".join(line(names, row) for row in rows)
    if is_empty:
        raise BadQuery("the query has no rows: a dataset needs at least one record")


def is_text(statement: str) -> bool:
    try:
        statement.encode()
    except UnicodeEncodeError:
        return False
    return True


def sqlite_rows(database: str, statement: str) -> Generator[Block, None, None]:
    try:
        path = unquote(urlsplit(database).path).removeprefix("/")
    except ValueError as error:
        raise BadQuery(f"{database} is no address of a database ({error}): give --database sqlite:///FILE") from None
    try:
        with closing(sqlite3.connect(f"file:{quote(path)}?mode=ro", uri=True)) as connection:
            connection.execute("PRAGMA query_only=ON")
            connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)  # what a statement attaches is made where it is not there
            yield from blocks(connection.execute(statement))
    except sqlite3.Error as error:
        raise BadQuery(f"the database says: {error}") from None


def postgresql_rows(database: str, statement: str) -> Generator[Block, None, None]:
    import psycopg  # only those who ask a PostgreSQL need it

    try:
        with psycopg.connect(database) as connection:
            connection.read_only = True
            with connection.cursor(name="dataset") as cursor:  # of the server: rows come as they are fetched
                cursor.execute(statement.encode())
                yield from blocks(cursor)
    except psycopg.Error as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadQuery(f"the database says: {PASSWORD.sub('***', said)}") from None


def blocks(cursor: Any) -> Iterator[Block]:
    names: list[str] | None = None
    while rows := cursor.fetchmany(ROWS):
        names = names or [column[0] for column in cursor.description]
        yield names, rows


def line(names: Sequence[str], row: Sequence[Any]) -> bytes:
    for name, value in zip(names, row, strict=True):
        if (number := not_finite(value)) is not None:
            raise BadQuery(f"column '{name}' holds {number}, which JSON has not: select NULL or a text instead")
    try:
        return msgspec.json.encode(dict(zip(names, row, strict=True))) + b"\n"
    except (TypeError, ValueError) as error:
        raise BadQuery(f"a row has a value without a form in JSON ({error}): cast it to text") from None


def not_finite(value: Any) -> float | None:
    """A number in a value that JSON has not: within an array it would become null without a word."""
    match value:
        case float():
            return None if math.isfinite(value) else value
        case list() | tuple():
            return next((found for each in value if (found := not_finite(each)) is not None), None)
        case dict():
            return not_finite(list(value.values()))
    return None
