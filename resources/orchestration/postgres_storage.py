"""Dagster's PostgreSQL storage with pooled connections; only `up` creates its tables.

Dagster opens a connection per query: on an idle stack that took a quarter of a CPU of the server. Moreover, every process
that opens a storage creates its tables one by one unless `runs` exists: a process killed in between left some missing, which
nothing ever completed.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, Self

import dagster as dg
from dagster._core.storage.base_storage import DagsterStorage
from dagster._core.storage.event_log import SqlEventLogStorageMetadata
from dagster._core.storage.runs import RunStorageSqlMetadata
from dagster._core.storage.schedules import ScheduleStorageSqlMetadata
from dagster._core.storage.sql import stamp_alembic_rev
from dagster._serdes import ConfigurableClassData
from dagster_postgres import DagsterPostgresStorage, PostgresEventLogStorage, PostgresRunStorage, PostgresScheduleStorage
from dagster_postgres.event_log import event_log
from dagster_postgres.utils import pg_alembic_config
from sqlalchemy import Engine, create_engine, event, inspect
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DisconnectionError
from sqlalchemy.pool import NullPool

from resources.metadata.database import is_readable
from resources.orchestration.postgres_schema import dagster_database_url
from resources.settings.settings import Settings

POOL_SIZE = 3
"""Idle connections kept per process; more are opened on demand."""


@cache
def pooled_engine(address: str, statement_milliseconds: int | None = None) -> Engine:
    """Return one pool per process, because each sensor tick opens its own instance."""
    url = make_url(address)
    if statement_milliseconds is not None:
        options = f"{url.query['options']} -cstatement_timeout={statement_milliseconds}"
        url = url.update_query_dict({"options": options})
    engine = create_engine(url, isolation_level="AUTOCOMMIT", pool_size=POOL_SIZE, max_overflow=-1)

    @event.listens_for(engine, "checkout")
    def check(connection: Any, *_: Any) -> None:
        # After a server restart or a cut connection, Dagster would otherwise fail in the middle of its work.
        if is_readable(connection.fileno()):
            raise DisconnectionError

    return engine


class PooledConnections:
    """Makes a storage use its process's connection pool."""

    _engine: Engine

    def __init__(self, address: str) -> None:
        super().__init__(address, should_autocreate_tables=False)  # type: ignore[call-arg]
        self.address = address
        self._engine = pooled_engine(address)

    def optimize_for_webserver(self, statement_timeout: int, pool_recycle: int, max_overflow: int) -> None:
        """Limit queries of the web server to `statement_timeout` milliseconds."""
        self._engine = pooled_engine(self.address, statement_timeout)


class PooledRunStorage(PooledConnections, PostgresRunStorage):  # type: ignore[misc]
    """Runs and daemon heartbeats."""

    def upgrade(self) -> None:
        """Create the tables of all three storages first; called by `dagster instance migrate`."""
        create_tables(self.address)
        super().upgrade()


class PooledEventLogStorage(PooledConnections, PostgresEventLogStorage):  # type: ignore[misc]
    """Event logs and materializations."""


class PooledScheduleStorage(PooledConnections, PostgresScheduleStorage):  # type: ignore[misc]
    """Sensors and their ticks."""


def create_tables(address: str) -> None:
    """Create all tables in one transaction, unless they exist."""
    engine = create_engine(address, poolclass=NullPool)
    with engine.begin() as connection:
        if inspect(connection).has_table("runs"):
            return
        for metadata in (RunStorageSqlMetadata, SqlEventLogStorageMetadata, ScheduleStorageSqlMetadata):
            metadata.create_all(connection)
        stamp_alembic_rev(pg_alembic_config(event_log.__file__), connection)


class OwnSchemaStorage(DagsterPostgresStorage):  # type: ignore[misc]
    """The storage that `up` configures in `dagster.yaml` on a cluster. Configuration: `schema`.

    The URL comes from the settings, which each process of the stack reads: it contains a password, while the content of
    `dagster.yaml` is an argument of each run worker, visible to every user of the machine.
    """

    def __init__(self, address: str, inst_data: ConfigurableClassData | None = None) -> None:
        self.postgres_url = address
        self.should_autocreate_tables = False
        self._inst_data = inst_data
        self._run_storage = PooledRunStorage(address)
        self._event_log_storage = PooledEventLogStorage(address)
        self._schedule_storage = PooledScheduleStorage(address)
        DagsterStorage.__init__(self)  # skip the direct base class, which would create all three storages again

    @classmethod
    def config_type(cls) -> Mapping[str, Any]:
        return {"schema": dg.StringSource}

    @classmethod
    def from_config_value(cls, inst_data: ConfigurableClassData | None, config_value: Mapping[str, Any]) -> Self:
        return cls(dagster_database_url(Settings.load(), config_value["schema"]), inst_data)
