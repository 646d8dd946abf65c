"""Connect to the metadata database, and keep planner statistics fresh."""

import select
import sqlite3
from contextlib import AbstractContextManager
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DisconnectionError

from resources.settings.sections import CONNECT_SECONDS

# Connections and transactions. SQLite in WAL mode by default, PostgreSQL in production, through one interface.


class Database:
    """The metadata database at a SQLAlchemy URL. Opening it makes no connection.

    Args:
        connect_seconds: how long a server is waited for that says nothing, unless the URL itself says so.
    """

    def __init__(self, url: str, connect_seconds: int = CONNECT_SECONDS) -> None:
        self.url = with_driver(url)
        self.engine = open_engine(self.url, connect_seconds)
        # Each of PostgreSQL's statements sees the newest state anyway: a transaction around them is two answers to wait for,
        # and SQLAlchemy works at the beginning and the end of one that it knows to be none.
        reader = self.engine.execution_options(isolation_level="AUTOCOMMIT")
        self._read = self.engine.begin if self.engine.dialect.name == "sqlite" else reader.connect
        self._writer = self.engine.execution_options(hanzo_ml_write=True)

    def read(self) -> AbstractContextManager[Connection]:
        """For statements that read. Those of SQLite see one state of the database, those of PostgreSQL the newest each."""
        return self._read()

    def write(self) -> AbstractContextManager[Connection]:
        """A transaction that changes it: all of it or nothing."""
        return self._writer.begin()

    def migrate(self) -> None:
        """Bring the schema to the newest revision."""
        from resources.metadata.migrate import migrate_database

        migrate_database(self)

    def close(self) -> None:
        self.engine.dispose()


def with_driver(url: str) -> str:
    """PostgreSQL is reached through psycopg 3, whatever driver SQLAlchemy would choose for `postgresql://`."""
    parsed = make_url(url)
    if parsed.drivername == "postgresql":
        return parsed.set(drivername="postgresql+psycopg").render_as_string(hide_password=False)
    return url


def open_engine(url: str, connect_seconds: int) -> Engine:
    return open_sqlite(url) if make_url(url).get_backend_name() == "sqlite" else open_postgresql(url, connect_seconds)


def connection_timeouts(seconds: int) -> dict[str, int]:
    """A host that swallows packets is given up, by whoever connects to it and by whoever had when it went silent: psycopg
    waits for 130 s, and a connection for a quarter of an hour, or where nothing is being sent for more than two.

    Only the machine has to answer in that time: a statement may take as long as it likes.
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
        # A plan is kept until the next ANALYZE, and one made while a table was small reads all of it ever after: each metric
        # cost 2 ms once there were 10,000 series. Whatever is asked often has an index. To compile a plan never pays here.
        connection.execute("SET enable_seqscan = off")
        connection.execute("SET jit = off")
        connection.commit()

    @event.listens_for(engine, "checkout")
    def check(connection: Any, *_: Any) -> None:
        # A server that is not asked says nothing, but farewell. To ask it each time would cost another answer to wait for.
        if is_readable(connection.pgconn.socket):
            raise DisconnectionError

    # Its driver is loaded where it is used.
    from resources.metadata.postgresql_pipeline import forget_prepared

    for undone in ("rollback", "rollback_savepoint"):
        event.listen(engine, undone, forget_prepared)
    return engine


def open_sqlite(url: str) -> Engine:
    engine = create_engine(url, connect_args={"timeout": 60})

    @event.listens_for(engine, "connect")
    def configure(connection: sqlite3.Connection, _: Any) -> None:
        connection.isolation_level = None
        # NORMAL survives the death of any process; FULL is needed only against the loss of power, and costs an fsync each.
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute("PRAGMA foreign_keys=ON")
        # Of 2 MB, the default, a search over a few thousand runs reads its pages again and again.
        connection.execute("PRAGMA cache_size=-16000")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A transaction that reads first and writes later fails with "database is locked", whatever the timeout, as soon as
        # another process wrote in between: a writer takes the lock at its start.
        writes = connection.get_execution_options().get("hanzo_ml_write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def is_readable(socket: int) -> bool:
    """Whether something came in, or the other side has closed."""
    poll = select.poll()
    poll.register(socket, select.POLLIN)
    return bool(poll.poll(0))


# What PostgreSQL's planner knows of its tables, kept up to date while they grow fast.
#
# Autovacuum looks once a minute: until then a search among 2,000 runs that had just been logged was planned for a table
# of none, and took twice the processor. SQLite needs none of it: its queries have one plan.

GROWN_TABLES_QUERY = text(
    "SELECT relid::regclass::text FROM pg_stat_user_tables"
    " WHERE n_mod_since_analyze > 1000 AND n_mod_since_analyze > 0.2 * n_live_tup ORDER BY 1"
)
"""Autovacuum's own rule is a tenth; rarer here, because it comes by and by anyway."""


def analyze_grown_tables(database: Database) -> list[str]:
    """Have tables analyzed that a fifth was added to. Returns their names. It holds up nobody who reads or writes."""
    if database.engine.dialect.name != "postgresql":
        return []
    with database.read() as connection:
        grown = list(connection.execute(GROWN_TABLES_QUERY).scalars())
        for table in grown:
            # Quoted by regclass. Another server may be at it.
            connection.execute(text(f"ANALYZE (SKIP_LOCKED) {table}"))
    return grown
