"""Send prepared statements to PostgreSQL together and wait once for all results.

psycopg's own pipeline costs three times as much, because it is designed for results that are needed one by one. This module
uses only its C layer, and shares the connection and its transaction with psycopg and SQLAlchemy.
"""

import select
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import psycopg
from psycopg.errors import error_from_result
from psycopg.pq import ConnStatus, ExecStatus, TransactionStatus
from sqlalchemy import Connection, PoolProxiedConnection

Values = Sequence[bytes]
Rows = list[list[bytes]]
SUCCESS_STATUSES = (ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK)

PREPARED = "prepared"
"""Key in a pooled connection's `info` (which lives as long as the connection) for its prepared statements."""
PREPARED_QUERY = b"SELECT name FROM pg_prepared_statements"


def forget_prepared(connection: Connection, *_: object) -> None:
    """Handle a rollback, after which psycopg deallocates all prepared statements including ours."""
    if not connection.invalidated:  # a lost connection has none, and SQLAlchemy denies access to it
        connection.connection.info.pop(PREPARED, None)


class Pipeline:
    """A pipeline over one connection. Begins a transaction if there is none, as psycopg does."""

    def __init__(self, pooled: PoolProxiedConnection, statements: Mapping[bytes, bytes]) -> None:
        driver: Any = pooled.driver_connection
        self.driver: psycopg.Connection[Any] = driver
        self._pgconn: Any = driver.pgconn
        self._waiting: list[tuple[bytes, Values]] = []
        if self._pgconn.transaction_status == TransactionStatus.IDLE:
            self.add(b"begin")
        if pooled.info.get(PREPARED) is not statements:
            [rows] = self._exchange(lambda: self._pgconn.send_query_params(PREPARED_QUERY, None))
            missing = statements.keys() - {name for (name,) in rows}
            self._exchange(lambda: [self._pgconn.send_prepare(name, statements[name]) for name in sorted(missing)])
            pooled.info[PREPARED] = statements

    def add(self, name: bytes, values: Values = ()) -> None:
        self._waiting.append((name, values))

    def run(self) -> dict[bytes, Rows]:
        """Send the added statements. Returns each one's rows by name, values as text.

        Raises:
            psycopg.Error: the first statement that failed; later ones were not executed.
        """
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return {}
        answers = self._exchange(lambda: [self._pgconn.send_query_prepared(name, values) for name, values in waiting])
        return dict(zip([name for name, _ in waiting], answers, strict=True))

    def _exchange(self, send: Callable[[], object]) -> list[Rows]:
        pgconn = self._pgconn
        pgconn.enter_pipeline_mode()
        send()
        pgconn.pipeline_sync()
        answers: list[Rows] = []
        failure: psycopg.Error | None = None
        for result in self._results():
            if result.status in SUCCESS_STATUSES:
                answers.append(_rows(result))
            elif failure is None:
                failure = error_from_result(result)
        pgconn.exit_pipeline_mode()
        if failure is not None:
            raise failure
        return answers

    def _results(self) -> Iterator[Any]:
        """Yield the results up to the end of the pipeline; releases the GIL while waiting."""
        pgconn = self._pgconn
        poll = select.poll()
        unsent = pgconn.flush()
        poll.register(pgconn.socket, select.POLLIN | (select.POLLOUT if unsent else 0))
        while True:
            while pgconn.is_busy():
                [(_, happened)] = poll.poll()
                if happened & select.POLLOUT and not pgconn.flush():
                    poll.modify(pgconn.socket, select.POLLIN)
                if happened & ~select.POLLOUT:
                    pgconn.consume_input()
            result = pgconn.get_result()
            if result is None:
                if pgconn.status != ConnStatus.OK:
                    raise psycopg.OperationalError("the connection is lost")
            elif result.status == ExecStatus.PIPELINE_SYNC:
                return
            else:
                yield result


def text_array(values: Iterable[str]) -> bytes:
    """Return an array of texts in PostgreSQL's text format."""
    quoted = ('"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"' for value in values)
    return ("{" + ",".join(quoted) + "}").encode()


def number_array(values: Iterable[float]) -> bytes:
    """Return an array of numbers or booleans in PostgreSQL's text format."""
    return ("{" + ",".join(map(repr, values)) + "}").encode()


def _rows(result: Any) -> Rows:
    columns = range(result.nfields)
    return [[result.get_value(row, column) for column in columns] for row in range(result.ntuples)]
