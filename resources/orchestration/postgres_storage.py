"""Dagster's PostgreSQL storage as it is, but that it keeps its connections, and that nobody but `up` makes its tables.

Dagster connects anew for each query: where nothing happened, that took a quarter of a processor of the server. And whoever
opens a storage makes its tables, one by one, where there is no `runs`: who was killed in between left some of them, which
nobody ever completed.
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
"""By each process, for when nothing happens; beside those, as many as it works with."""


@cache
def pooled_engine(address: str, statement_milliseconds: int | None = None) -> Engine:
    """One pool for a process: a sensor's look opens an instance of its own, and what it has compiled is to be kept, too."""
    url = make_url(address)
    if statement_milliseconds is not None:
        options = f"{url.query['options']} -cstatement_timeout={statement_milliseconds}"
        url = url.update_query_dict({"options": options})
    engine = create_engine(url, isolation_level="AUTOCOMMIT", pool_size=POOL_SIZE, max_overflow=-1)

    @event.listens_for(engine, "checkout")
    def check(connection: Any, *_: Any) -> None:
        # Of a server that was started anew, or cut us off: Dagster would fail in the middle of what it does.
        if is_readable(connection.fileno()):
            raise DisconnectionError

    return engine


class PooledConnections:
    """Of a storage: the connections of its process."""

    _engine: Engine

    def __init__(self, address: str) -> None:
        super().__init__(address, should_autocreate_tables=False)  # type: ignore[call-arg]
        self.address = address
        self._engine = pooled_engine(address)

    def optimize_for_webserver(self, statement_timeout: int, pool_recycle: int, max_overflow: int) -> None:
        """A page is given up where a query takes as many milliseconds; our pool needs no more."""
        self._engine = pooled_engine(self.address, statement_timeout)


class PooledRunStorage(PooledConnections, PostgresRunStorage):  # type: ignore[misc]
    """Runs, and the daemon's heartbeats."""

    def upgrade(self) -> None:
        """Of all three, by `dagster instance migrate`, which begins here: nothing else makes tables."""
        create_tables(self.address)
        super().upgrade()


class PooledEventLogStorage(PooledConnections, PostgresEventLogStorage):  # type: ignore[misc]
    """What runs said, and what was materialized."""


class PooledScheduleStorage(PooledConnections, PostgresScheduleStorage):  # type: ignore[misc]
    """Sensors, and each of their looks."""


def create_tables(address: str) -> None:
    """All, or none: in one transaction."""
    engine = create_engine(address, poolclass=NullPool)
    with engine.begin() as connection:
        if inspect(connection).has_table("runs"):
            return
        for metadata in (RunStorageSqlMetadata, SqlEventLogStorageMetadata, ScheduleStorageSqlMetadata):
            metadata.create_all(connection)
        stamp_alembic_rev(pg_alembic_config(event_log.__file__), connection)


class OwnSchemaStorage(DagsterPostgresStorage):  # type: ignore[misc]
    """What `up` names in `dagster.yaml` on a cluster. Configuration: `schema`.

    The address is that of the settings, which each process of the stack reads: it has a password, and what stands in
    `dagster.yaml` is an argument of each run worker, which everybody on the machine may read.
    """

    def __init__(self, address: str, inst_data: ConfigurableClassData | None = None) -> None:
        self.postgres_url = address
        self.should_autocreate_tables = False
        self._inst_data = inst_data
        self._run_storage = PooledRunStorage(address)
        self._event_log_storage = PooledEventLogStorage(address)
        self._schedule_storage = PooledScheduleStorage(address)
        DagsterStorage.__init__(self)  # not the next one's, which would make all three once more

    @classmethod
    def config_type(cls) -> Mapping[str, Any]:
        return {"schema": dg.StringSource}

    @classmethod
    def from_config_value(cls, inst_data: ConfigurableClassData | None, config_value: Mapping[str, Any]) -> Self:
        return cls(dagster_database_url(Settings.load(), config_value["schema"]), inst_data)
