"""SQLite and PostgreSQL databases for lineage tests."""

from tests.resources.metadata.conftest import database, database_url, migrated_sqlite, postgres, postgres_url, sqlite_url

__all__ = ["database", "database_url", "migrated_sqlite", "postgres", "postgres_url", "sqlite_url"]
