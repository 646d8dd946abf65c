"""Read the rows of a read-only SQL query as JSON lines, from SQLite and PostgreSQL.

Used by the command line for databases that the user can reach, and by the server for those that its operator configured.
Values are encoded like those of Arrow (`resources.ingest.columnar`): decimals, dates and times as text, binary values in
base64. Memory holds a block of lines and one row.
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
"""Maximum bytes of a value in SQLite, which can create large ones from short expressions (`zeroblob`); no line is longer."""
STEPS_PER_TIMEOUT_CHECK = 10_000
"""Virtual machine instructions of SQLite between two checks of the timeout."""
PASSWORD = re.compile(r"(?<=://)[^\s/]*(?=@)")
"""The password in an address, with the user. libpq repeats an address that it cannot parse."""
DENIED_ACTIONS = (sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH, sqlite3.SQLITE_PRAGMA)
Row: TypeAlias = tuple[Sequence[str], Sequence[Any]]
"""Column names, the same for each row, and values."""


class BadQuery(Exception):
    """The database or the query is invalid; the message is one line without passwords."""


class ConnectionRefused(BadQuery):
    """The database cannot be reached.

    The message may reveal its location.
    """


def iterate_query_lines(database: str, statement: str, seconds: int | None = None) -> Iterator[bytes]:
    """Yield the rows of a statement in blocks of lines.

    Args:
        database: `sqlite:///FILE` or `postgresql://USER:PASSWORD@HOST/NAME`.
        seconds: time limit for reading all rows; None for no limit.
    """
    if not database.isprintable() or not is_text(statement):
        raise BadQuery("the query, or the address of the database, contains text that is not valid UTF-8: correct it")
    scheme = database.partition(":")[0]
    if scheme == "sqlite":
        rows = iterate_sqlite_rows(database, statement, seconds)
    elif scheme in ("postgresql", "postgres"):
        rows = iterate_postgresql_rows(database, statement, seconds)
    else:
        raise BadQuery("unsupported database: use --database sqlite:///FILE or postgresql://USER@HOST/NAME")
    known: Sequence[str] | None = None
    waiting: list[bytes] = []
    length = 0
    with closing(rows):  # an error must not keep a connection open for as long as it is referenced
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
    """Return whether databases read all of a statement: some stop at NUL."""
    try:
        statement.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in statement


def refuse_duplicate_columns(names: Sequence[str]) -> None:
    if double := next((name for name in names if names.count(name) > 1), None):
        raise BadQuery(f"two columns of the query have the name '{double}': rename one with AS")


def timeout_error(seconds: int | None) -> BadQuery:
    return BadQuery(f"the query exceeded the limit of {seconds} s: select fewer rows at a time")


def iterate_sqlite_rows(database: str, statement: str, seconds: int | None) -> Generator[Row, None, None]:
    try:
        path = unquote(urlsplit(database).path).removeprefix("/")
    except ValueError as error:
        raise BadQuery(f"{database} is not a database address ({error}): use --database sqlite:///FILE") from None
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
    """Deny actions that a read-only connection still allows.

    ATTACH could create files, and PRAGMA could change settings of the whole process, such as memory limits.
    """
    is_own = action not in DENIED_ACTIONS or name == "data_version"  # full-text search reads it
    return sqlite3.SQLITE_OK if is_own else sqlite3.SQLITE_DENY


def iterate_postgresql_rows(database: str, statement: str, seconds: int | None) -> Generator[Row, None, None]:
    import psycopg  # imported only for PostgreSQL

    try:
        connection = psycopg.connect(database)
    except psycopg.Error as error:
        raise ConnectionRefused(f"the database says: {describe_error(error)}") from None
    try:
        with connection, connection.cursor(name="dataset") as query, connection.cursor() as rows:
            connection.read_only = True
            connection.execute("SET LOCAL TIME ZONE 'UTC'")  # otherwise timestamps would depend on the reader's time zone
            connection.execute("SELECT set_config('statement_timeout', %s, true)", (f"{seconds or 0}s",))
            query.execute(statement.encode())  # DECLARE CURSOR accepts a single statement, which must be a query
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
            raise BadQuery(f"column '{name}' contains {number}, which JSON cannot represent: select NULL or a text instead")
    try:
        return msgspec.json.encode(dict(zip(names, row, strict=True))) + b"\n"
    except (TypeError, ValueError) as error:
        raise BadQuery(f"a row has a value that JSON cannot represent ({error}): cast it to text") from None


def find_non_finite(value: Any) -> float | None:
    """Return a non-finite number in a value, or None.

    In an array it would silently become null.
    """
    match value:
        case float():
            return None if math.isfinite(value) else value
        case list() | tuple():
            return next((found for each in value if (found := find_non_finite(each)) is not None), None)
        case dict():
            return find_non_finite(list(value.values()))
    return None
