"""Fixtures of migrated, empty databases, SQLite, PostgreSQL or both."""

from collections.abc import Iterator

import pytest

from resources.metadata.database import Database
from tests.support.postgres_server import migrated_sqlite, postgres, postgres_url, sqlite_url

__all__ = ["migrated_sqlite", "postgres", "postgres_url", "sqlite_url"]


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest) -> str:
    name = {"sqlite": "sqlite_url", "postgresql": "postgres_url"}[request.param]
    url: str = request.getfixturevalue(name)
    return url


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """Yield SQLite and PostgreSQL in turn.

    Tests that need only one of them use `sqlite_url` or `postgres_url`.
    """
    database = Database(database_url)
    yield database
    database.close()
