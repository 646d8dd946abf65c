"""Dagster's SQLite storage with persistent connections.

Dagster creates an engine per query, which compiles the statement again and closes the file, so that SQLite checkpoints its
log each time. On an idle laptop the daemon took a fifth of a CPU for that.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Self

from dagster._core.storage.base_storage import DagsterStorage
from dagster._core.storage.event_log.sqlite.sqlite_event_log import INDEX_SHARD_NAME, SqliteEventLogStorage
from dagster._core.storage.runs.sqlite.sqlite_run_storage import SqliteRunStorage
from dagster._core.storage.schedules.sqlite.sqlite_schedule_storage import SqliteScheduleStorage
from dagster._core.storage.sqlite_storage import DagsterSqliteStorage
from dagster._serdes import ConfigurableClassData
from sqlalchemy import Connection, Engine, create_engine

BUSY_TIMEOUT_SECONDS = 60
"""How long a statement waits for another process's lock; Dagster sets this for the event log only."""


def pooled_engine(address: str) -> Engine:
    """Return an engine with SQLAlchemy's default connection pool."""
    return create_engine(address, connect_args={"timeout": BUSY_TIMEOUT_SECONDS})


class PooledConnections:
    """`connect` for a storage with a single file."""

    _conn_string: str

    @cached_property
    def _engine(self) -> Engine:
        return pooled_engine(self._conn_string)

    @contextmanager
    def connect(self) -> Iterator[Connection]:
        with self._engine.begin() as connection:
            yield connection

    def dispose(self) -> None:
        self._engine.dispose()


class PooledRunStorage(PooledConnections, SqliteRunStorage):  # type: ignore[misc]
    """Runs and daemon heartbeats."""


class PooledScheduleStorage(PooledConnections, SqliteScheduleStorage):  # type: ignore[misc]
    """Sensors and their ticks."""


class PooledEventLogStorage(SqliteEventLogStorage):  # type: ignore[misc]
    """Keeps connections to the index file only; the files of runs are many."""

    @cached_property
    def _engine(self) -> Engine:
        return pooled_engine(self.conn_string_for_shard(INDEX_SHARD_NAME))

    @contextmanager
    def _connect(self, shard: str) -> Iterator[Connection]:
        if shard != INDEX_SHARD_NAME or shard not in self._initialized_dbs:
            with super()._connect(shard) as connection:
                yield connection
        else:
            with self._db_lock, self._engine.begin() as connection:
                yield connection

    def dispose(self) -> None:
        self._engine.dispose()
        super().dispose()


class KeptSqliteStorage(DagsterSqliteStorage):  # type: ignore[misc]
    """The storage that `up` configures in `dagster.yaml`; has the same files as Dagster's own."""

    def __init__(self, base_dir: str, inst_data: ConfigurableClassData | None = None) -> None:
        self.base_dir = base_dir
        self._inst_data = inst_data
        self._run_storage = PooledRunStorage.from_local(f"{base_dir}/history/")
        self._event_log_storage = PooledEventLogStorage(f"{base_dir}/history/runs/")
        self._schedule_storage = PooledScheduleStorage.from_local(f"{base_dir}/schedules")
        DagsterStorage.__init__(self)  # skip the direct base class, which would open all files again

    @classmethod
    def from_config_value(cls, inst_data: ConfigurableClassData, config_value: Mapping[str, Any]) -> Self:
        storage: Self = cls.from_local(inst_data=inst_data, **config_value)
        return storage
