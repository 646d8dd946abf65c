"""Leader election by a database lock on the connection that writes the leader's rows.

The controller of jobs and Dagster's daemon have a lock each.

A leader whose machine vanished must neither keep the lock nor write after another has acquired it. On PostgreSQL one session
ensures both: it holds an advisory lock, executes all of the leader's writes, and is ended by the server after 15 s without a
response. With SQLite all processes share a machine, so a file lock suffices.
"""

import fcntl
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO

from sqlalchemy import Connection, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError

from resources.metadata.database import Database

log = logging.getLogger(__name__)

ADVISORY_LOCK = 57_000_002
"""Number of the controller's lock."""
SESSION_SECONDS = 15
"""How long the server waits for a leader that does not respond."""
LOCK_SECONDS = 5
"""How long the leader waits for a locked row before it continues with other jobs."""
LOCK_NOT_AVAILABLE = "55P03"
"""PostgreSQL's error code for a lock timeout."""
RETRY_SECONDS = 1.0


class LeadershipLost(Exception):
    """The session that holds the lock has ended: another process may lead."""


class RowLocked(Exception):
    """Another session holds a row lock, such as an API waiting for the object store.

    Retry later.
    """


class LeaderDatabase(Database):
    """Database accessed through the one session that holds the lock, by one thread."""

    def __init__(self, url: str, connect_seconds: int, advisory_lock: int = ADVISORY_LOCK) -> None:
        super().__init__(url, connect_seconds)
        self._advisory_lock = advisory_lock
        self._session: Connection | None = None

    def acquire(self) -> bool:
        """Try to become the leader; return False while another process leads."""
        session = self.engine.connect()
        pause = SESSION_SECONDS // 3
        session.execute(text(f"SET tcp_keepalives_idle = {pause}"))
        session.execute(text(f"SET tcp_keepalives_interval = {pause}"))
        session.execute(text("SET tcp_keepalives_count = 2"))
        session.execute(text(f"SET tcp_user_timeout = {SESSION_SECONDS * 1000}"))
        session.execute(text(f"SET lock_timeout = '{LOCK_SECONDS}s'"))
        lock = {"lock": self._advisory_lock}
        locked = bool(session.execute(text("SELECT pg_try_advisory_lock(:lock)"), lock).scalar_one())
        session.commit()
        if locked:
            self._session = session
        else:
            session.close()
        return locked

    def read(self) -> AbstractContextManager[Connection]:
        return self._transaction()

    def write(self) -> AbstractContextManager[Connection]:
        return self._transaction()

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None
        super().close()  # of the pool's sessions too, and with them the lock

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        if self._session is None or self._session.invalidated:
            raise LeadershipLost("the database has ended the session")
        try:
            with self._session.begin():
                yield self._session
        except DBAPIError as error:
            if error.connection_invalidated:
                raise LeadershipLost(str(error.orig)) from error
            if getattr(error.orig, "sqlstate", None) == LOCK_NOT_AVAILABLE:
                raise RowLocked(str(error.orig)) from error
            raise


@contextmanager
def lead(
    url: str,
    connect_seconds: int,
    lock_file: Path,
    stopped: threading.Event,
    *,
    advisory_lock: int = ADVISORY_LOCK,
    waiting: Callable[[], object] = lambda: None,
) -> Iterator[Database]:
    """Wait until this process leads; yield the database to write through.

    Args:
        advisory_lock: number of the lock on PostgreSQL.
        waiting: called before each attempt to lead, about once a second.

    Raises:
        LeadershipLost: `stopped` was set before this process led; raised by the yielded database, its session has ended.
    """
    if make_url(url).get_backend_name() == "sqlite":
        with lock_file.open("w", encoding="utf-8") as file:
            wait_for(lambda: lock(file), stopped, waiting)
            database = Database(url, connect_seconds)
            try:
                yield database
            finally:
                database.close()
        return
    leader = LeaderDatabase(url, connect_seconds, advisory_lock)
    try:
        wait_for(leader.acquire, stopped, waiting)
        yield leader
    finally:
        leader.close()


def lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_for(acquire: Callable[[], bool], stopped: threading.Event, waiting: Callable[[], object]) -> None:
    while not stopped.is_set():
        waiting()
        try:
            if acquire():
                return
        except DBAPIError as problem:
            log.warning("cannot acquire leadership, will retry: %s", problem.orig)
        stopped.wait(RETRY_SECONDS)
    raise LeadershipLost("stopped")
