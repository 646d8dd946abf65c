"""Import address that existing dagster.yaml files name; see `resources.orchestration.sqlite_storage`."""

from resources.orchestration.sqlite_storage import KeptSqliteStorage

__all__ = ["KeptSqliteStorage"]
