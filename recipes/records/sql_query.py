"""The rows of a SQL query as JSON lines, by a statement that can only read. The command line reads databases of its own
machine so, the server those that its operator names.

Of SQLite and PostgreSQL. Values are in the forms that datasets have for those of Arrow (`resources.ingest.columnar`):
decimals, dates and times are texts, binary values base64. In memory are a block of lines and one row.
"""

import math
import re
import sqlite3
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from typing import Any, TypeAlias, cast
from urllib.parse import quote, unquote, urlsplit

import msgspec

BLOCK_BYTES = 1 << 20
MAX_VALUE_BYTES = 64 << 20
"""Bytes of a value of SQLite, which makes some of a few letters (`zeroblob`): no line of a dataset is longer."""
STEPS_PER_TIMEOUT_CHECK = 10_000
"""Of SQLite's machine between two looks at the clock."""
PASSWORD = re.compile(r"(?<=://)[^\s/]*(?=@)")
"""In an address, with the name before it. libpq repeats an address that it cannot read."""
DENIED_ACTIONS = (sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH, sqlite3.SQLITE_PRAGMA)
Row: TypeAlias = tuple[Sequence[str], Sequence[Any]]
"""The names of the columns, the same ones for each row, and its values."""


class BadQuery(Exception):
    """The database or the query is no good; the message is one line without any password."""


class ConnectionRefused(BadQuery):
    """The database cannot be reached. The message may tell where it is."""


def iterate_query_lines(database: str, statement: str, seconds: int | None = None) -> Iterator[bytes]:
    """The rows of a statement, in blocks of lines.

    Args:
        database: `sqlite:///FILE` or `postgresql://USER:PASSWORD@HOST/NAME`.
        seconds: how long it may take, until the last row is read; as long as it likes when None.
    """
    if not database.isprintable() or not is_text(statement):
        raise BadQuery("the query, or the address of the database, holds what is no text in UTF-8: correct it")
    scheme = database.partition(":")[0]
    if scheme == "sqlite":
        rows = iterate_sqlite_rows(database, statement, seconds)
    elif scheme in ("postgresql", "postgres"):
        rows = iterate_postgresql_rows(database, statement, seconds)
    else:
        raise BadQuery("no database that can be read: give --database sqlite:///FILE or postgresql://USER@HOST/NAME")
    known: Sequence[str] | None = None
    waiting: list[bytes] = []
    length = 0
    with closing(rows):  # what is refused leaves no connection open for as long as somebody holds the refusal
        for names, values in rows:
            if known is None:
                refuse_duplicate_columns(names)
                known = names
            waiting.append(encode_row(names, values))
            length += len(waiting[-1])
            if length >= BLOCK_BYTES:
                yield b"".join(waiting)
                waiting, length = [], 0
    if known is None:
        raise BadQuery("the query has no rows: a dataset needs at least one record")
    if waiting:
        yield b"".join(waiting)


def is_text(statement: str) -> bool:
    """Whether databases read all of it: a zero ends it for some."""
    try:
        statement.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in statement


def refuse_duplicate_columns(names: Sequence[str]) -> None:
    if double := next((name for name in names if names.count(name) > 1), None):
        raise BadQuery(f"two columns of the query are called '{double}': rename one with AS")


def timeout_error(seconds: int | None) -> BadQuery:
    return BadQuery(f"the query took longer than the {seconds} s that it may: ask for less at a time")


def iterate_sqlite_rows(database: str, statement: str, seconds: int | None) -> Generator[Row, None, None]:
    try:
        path = unquote(urlsplit(database).path).removeprefix("/")
    except ValueError as error:
        raise BadQuery(f"{database} is no address of a database ({error}): give --database sqlite:///FILE") from None
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    try:
        connection = sqlite3.connect(f"file:{quote(path)}?mode=ro", uri=True)
    except sqlite3.Error as error:
        raise ConnectionRefused(f"the database says: {error}") from None
    try:
        with closing(connection):
            connection.set_authorizer(authorize_action)
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
            connection.set_progress_handler(lambda: time.monotonic() > deadline, STEPS_PER_TIMEOUT_CHECK)
            cursor = connection.execute(statement)
            names = [column[0] for column in cursor.description or ()]
            yield from ((names, values) for values in cursor)
    except (sqlite3.Error, sqlite3.Warning) as error:
        if time.monotonic() > deadline:
            raise timeout_error(seconds) from None
        raise BadQuery(f"the database says: {error}") from None


def authorize_action(action: int, name: str | None, *_: object) -> int:
    """A file that is opened to be read refuses what writes to it, and not what makes others (ATTACH), nor settings that hold
    for a whole process, such as the memory that all its databases may take (PRAGMA).
    """
    is_own = action not in DENIED_ACTIONS or name == "data_version"  # which full-text search looks at
    return sqlite3.SQLITE_OK if is_own else sqlite3.SQLITE_DENY


def iterate_postgresql_rows(database: str, statement: str, seconds: int | None) -> Generator[Row, None, None]:
    import psycopg  # only those who ask a PostgreSQL need it

    try:
        connection = psycopg.connect(database)
    except psycopg.Error as error:
        raise ConnectionRefused(f"the database says: {describe_error(error)}") from None
    try:
        with connection, connection.cursor(name="dataset") as query, connection.cursor() as rows:
            connection.read_only = True
            connection.execute("SET LOCAL TIME ZONE 'UTC'")  # or a point in time would be another text for another reader
            connection.execute("SELECT set_config('statement_timeout', %s, true)", (f"{seconds or 0}s",))
            query.execute(statement.encode())  # DECLARE CURSOR takes one statement, and none but a query
            stream = cast(Generator[Any, None, None], rows.stream('FETCH ALL FROM "dataset"'))
            with closing(stream):
                names: list[str] = []
                for values in stream:
                    names = names or [column.name for column in rows.description or ()]
                    yield names, values
    except psycopg.errors.QueryCanceled:
        raise timeout_error(seconds) from None
    except psycopg.Error as error:
        raise BadQuery(f"the database says: {describe_error(error)}") from None


def describe_error(error: Exception) -> str:
    return PASSWORD.sub("***", (str(error).splitlines() or [type(error).__name__])[0])


def encode_row(names: Sequence[str], row: Sequence[Any]) -> bytes:
    for name, value in zip(names, row, strict=True):
        if (number := find_non_finite(value)) is not None:
            raise BadQuery(f"column '{name}' holds {number}, which JSON has not: select NULL or a text instead")
    try:
        return msgspec.json.encode(dict(zip(names, row, strict=True))) + b"\n"
    except (TypeError, ValueError) as error:
        raise BadQuery(f"a row has a value without a form in JSON ({error}): cast it to text") from None


def find_non_finite(value: Any) -> float | None:
    """A number in a value that JSON has not: within an array it would become null without a word."""
    match value:
        case float():
            return None if math.isfinite(value) else value
        case list() | tuple():
            return next((found for each in value if (found := find_non_finite(each)) is not None), None)
        case dict():
            return find_non_finite(list(value.values()))
    return None
