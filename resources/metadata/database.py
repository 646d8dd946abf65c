"""Connect to the metadata database, and keep planner statistics fresh."""

import select
import sqlite3
from contextlib import AbstractContextManager
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DisconnectionError

from resources.settings.sections import CONNECT_SECONDS

# Connections and transactions: SQLite in WAL mode by default, PostgreSQL in production, through one interface.


class Database:
    """The metadata database at a SQLAlchemy URL. Opening it makes no connection.

    Args:
        connect_seconds: how long to wait for a server that does not answer, unless the URL states it.
    """

    def __init__(self, url: str, connect_seconds: int = CONNECT_SECONDS) -> None:
        self.url = with_driver(url)
        self.engine = open_engine(self.url, connect_seconds)
        # Each PostgreSQL statement sees the newest state anyway: a transaction around them adds two round trips, and work in
        # SQLAlchemy at its beginning and end.
        reader = self.engine.execution_options(isolation_level="AUTOCOMMIT")
        self._read = self.engine.begin if self.engine.dialect.name == "sqlite" else reader.connect
        self._writer = self.engine.execution_options(hanzo_ml_write=True)

    def read(self) -> AbstractContextManager[Connection]:
        """Open a connection for reading.

        On SQLite all statements see one state, on PostgreSQL each sees the newest.
        """
        return self._read()

    def write(self) -> AbstractContextManager[Connection]:
        """Open a transaction for writing, which is committed as a whole or rolled back."""
        return self._writer.begin()

    def migrate(self) -> None:
        """Upgrade the schema to the newest revision."""
        from resources.metadata.migrate import migrate_database

        migrate_database(self)

    def close(self) -> None:
        self.engine.dispose()


def with_driver(url: str) -> str:
    """Make PostgreSQL URLs use psycopg 3, instead of SQLAlchemy's default for `postgresql://`."""
    parsed = make_url(url)
    if parsed.drivername == "postgresql":
        return parsed.set(drivername="postgresql+psycopg").render_as_string(hide_password=False)
    return url


def open_engine(url: str, connect_seconds: int) -> Engine:
    return open_sqlite(url) if make_url(url).get_backend_name() == "sqlite" else open_postgresql(url, connect_seconds)


def connection_timeouts(seconds: int) -> dict[str, int]:
    """Return the timeouts after which a connection to an unresponsive host fails.

    They apply to new and existing connections.

    By default, psycopg waits 130 s to connect; an existing connection waits a quarter of an hour, or more than two hours if
    nothing is being sent. Only the machine must answer within the timeout: a statement may take any time.
    """
    pause = max(1, seconds // 3)
    probing = {"keepalives_idle": pause, "keepalives_interval": pause, "keepalives_count": 3}
    return {"connect_timeout": seconds, "tcp_user_timeout": seconds * 1000, **probing}


def open_postgresql(url: str, connect_seconds: int) -> Engine:
    own = make_url(url).query
    arguments = {name: value for name, value in connection_timeouts(connect_seconds).items() if name not in own}
    engine = create_engine(url, connect_args={"client_encoding": "utf8", **arguments})

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _: Any) -> None:
        # A plan is kept until the next ANALYZE, and one that was made while a table was small keeps scanning all of it: each
        # metric cost 2 ms once there were 10,000 series. All frequent queries have an index. JIT compilation never pays off
        # here.
        connection.execute("SET enable_seqscan = off")
        connection.execute("SET jit = off")
        connection.commit()

    @event.listens_for(engine, "checkout")
    def check(connection: Any, *_: Any) -> None:
        # An idle server only sends something when it closes the connection. A query for each checkout would cost a round
        # trip.
        if is_readable(connection.pgconn.socket):
            raise DisconnectionError

    # Imported here, where its driver is used.
    from resources.metadata.postgresql_pipeline import forget_prepared

    for undone in ("rollback", "rollback_savepoint"):
        event.listen(engine, undone, forget_prepared)
    return engine


def open_sqlite(url: str) -> Engine:
    engine = create_engine(url, connect_args={"timeout": 60})

    @event.listens_for(engine, "connect")
    def configure(connection: sqlite3.Connection, _: Any) -> None:
        connection.isolation_level = None
        # NORMAL survives the kill of any process; FULL also survives a power failure, but costs an fsync for each
        # transaction.
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute("PRAGMA foreign_keys=ON")
        # With the default of 2 MB, a search over a few thousand runs reads the same pages again and again.
        connection.execute("PRAGMA cache_size=-16000")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A transaction that first reads and later writes fails with "database is locked", regardless of the timeout, if
        # another process wrote in between. Therefore a writer takes the lock at its start.
        writes = connection.get_execution_options().get("hanzo_ml_write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def is_readable(socket: int) -> bool:
    """Return whether data has arrived, or the other side has closed the connection."""
    poll = select.poll()
    poll.register(socket, select.POLLIN)
    return bool(poll.poll(0))


# Keeps PostgreSQL's planner statistics up to date while tables grow fast.
#
# Autovacuum checks once a minute: until then, a search among 2,000 runs that had just been logged was planned for an empty
# table, and took twice the CPU time. SQLite does not need this: its queries have only one plan.

GROWN_TABLES_QUERY = text(
    "SELECT relid::regclass::text FROM pg_stat_user_tables"
    " WHERE n_mod_since_analyze > 1000 AND n_mod_since_analyze > 0.2 * n_live_tup ORDER BY 1"
)
"""Autovacuum's own threshold is a tenth; this one is higher, because autovacuum also runs eventually."""


def analyze_grown_tables(database: Database) -> list[str]:
    """Analyze tables that have grown by a fifth, and return their names.

    It blocks neither reads nor writes.
    """
    if database.engine.dialect.name != "postgresql":
        return []
    with database.read() as connection:
        grown = list(connection.execute(GROWN_TABLES_QUERY).scalars())
        for table in grown:
            # Quoted by regclass. Another server may be at it.
            connection.execute(text(f"ANALYZE (SKIP_LOCKED) {table}"))
    return grown
