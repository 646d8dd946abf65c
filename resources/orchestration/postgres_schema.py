"""A separate schema for Dagster's history in the metadata database on a cluster.

Both applications have a table `runs` and a migration table, so the schemas must be separate. When the history was in the
state folder it was lost with the pod: the graph forgot its assets, and no run that died with the pod was resumed.
"""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, create_engine, func, inspect, select, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool
from sqlalchemy.schema import CreateSchema

from recipes.contracts.job import BadConfiguration
from resources.metadata.database import Database, connection_timeouts
from resources.settings.settings import Settings

SCHEMA_PREFIX = "dagster_of_"
"""Followed by the name of our tables' schema, so that installations sharing a database don't share a history."""
PREPARATION_LOCK_ID = 0x48616E7A70
"""PostgreSQL advisory lock held while preparing the schema, across pods."""
LOCK_POLL_SECONDS = 0.2
"""Pause between attempts to acquire that lock."""
COMMENT_QUERY = "SELECT obj_description(oid, 'pg_namespace') FROM pg_namespace WHERE nspname = :schema"


def is_postgresql(settings: Settings) -> bool:
    return make_url(settings.database_url).get_backend_name() == "postgresql"


def dagster_database_url(settings: Settings, schema: str) -> str:
    """Return the database URL for dagster-postgres (psycopg2), restricted to `schema`.

    Other options of the URL are kept.

    Raises:
        BadConfiguration: the database is not PostgreSQL.
    """
    if not is_postgresql(settings):
        raise BadConfiguration("database.url is not PostgreSQL, but Dagster's history is there: run `hanzo-ml up`")
    url = make_url(settings.database_url)
    own = url.query.get("options", "")
    only = f"-csearch_path={quote_option(schema)}"
    patient = {name: str(value) for name, value in connection_timeouts(settings.database.connect_seconds).items()}
    query: dict[str, str | tuple[str, ...]] = {"client_encoding": "utf8", **patient, **url.query}
    query["options"] = " ".join([*((own,) if isinstance(own, str) else own), only]).strip()  # the last search_path wins
    return url.set(drivername="postgresql+psycopg2", query=query).render_as_string(hide_password=False)


def quote_option(name: str) -> str:
    """Quote an identifier for the server's `options`, which escapes spaces with a backslash."""
    quoted = name.replace('"', '""')
    return "".join(f"\\{character}" if character in "\\ \t\n" else character for character in f'"{quoted}"')


@contextmanager
def locked_schema(settings: Settings) -> Iterator["DagsterSchema"]:
    """Create the schema if missing, and hold its preparation lock.

    Raises:
        BadConfiguration: it cannot be created or reached; the message says what to do.
    """
    database = Database(settings.database_url, settings.database.connect_seconds)
    try:
        with database.read() as connection:  # autocommit: writes need no transaction
            acquire_preparation_lock(connection)
            name = ensure_schema(connection)
            check_search_path(dagster_database_url(settings, name), name)
            yield DagsterSchema(name, connection)
    except SQLAlchemyError as problem:
        raise BadConfiguration(f"Dagster's history can't be prepared in database.url: {first_error_line(problem)}") from None
    finally:
        database.close()


class DagsterSchema:
    """A schema whose comment records how it was prepared.

    Stored there, the record survives the loss of the state folder and matches whichever backup is restored.
    """

    def __init__(self, name: str, connection: Connection) -> None:
        self.name = name
        self._connection = connection

    def read(self) -> dict[str, Any]:
        found = self._connection.execute(text(COMMENT_QUERY), {"schema": self.name}).scalar()
        return dict(json.loads(found)) if found else {}

    def write(self, document: Mapping[str, Any]) -> None:
        quoted = self._connection.dialect.identifier_preparer.quote(self.name)
        note = json.dumps(document).replace("'", "''")
        self._connection.exec_driver_sql(f"COMMENT ON SCHEMA {quoted} IS '{note}'")


def acquire_preparation_lock(connection: Connection) -> None:
    """Acquire the preparation lock, which lasts until the connection is closed.

    Polls instead of blocking: Dagster builds indexes concurrently, and each build waits for every running statement and
    transaction, including one that waits for this lock.
    """
    while not connection.execute(select(func.pg_try_advisory_lock(PREPARATION_LOCK_ID))).scalar():
        time.sleep(LOCK_POLL_SECONDS)


def ensure_schema(connection: Connection) -> str:
    """Return the name of the schema, after creating it if missing."""
    name = f"{SCHEMA_PREFIX}{connection.execute(select(func.current_schema())).scalar()}"
    if name in inspect(connection).get_schema_names():
        return name
    try:
        connection.execute(CreateSchema(name))
    except SQLAlchemyError as problem:
        quoted = connection.dialect.identifier_preparer.quote(name)
        raise BadConfiguration(
            f"the schema for Dagster's history can't be created: {first_error_line(problem)}: ask an administrator to run "
            f"`CREATE SCHEMA {quoted} AUTHORIZATION` with the user of database.url"
        ) from None
    return name


def check_search_path(address: str, schema: str) -> None:
    """Raise BadConfiguration if a pooler drops the options: Dagster would then use our tables."""
    engine = create_engine(address, poolclass=NullPool)
    with engine.connect() as connection:
        reached = connection.execute(select(func.current_schema())).scalar()
    if reached != schema:
        raise BadConfiguration(
            "a proxy between here and the server of database.url drops `options`, so that Dagster's history would be in "
            f"the schema {reached} instead of {schema}: connect to the server directly"
        )


def first_error_line(problem: SQLAlchemyError) -> str:
    return str(getattr(problem, "orig", problem)).partition("\n")[0]
