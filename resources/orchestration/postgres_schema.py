"""Dagster's history on a cluster: a schema of its own in the metadata database, beside our tables and never among them.

Both have a table `runs`, and one that says which migrations there were. The history was in the state folder, which dies with
the pod: the graph forgot what it had made, and nobody went on with the runs that the pod had died of.
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
"""Before the name of the schema with our tables: installations that share a database share no history."""
PREPARATION_LOCK_ID = 0x48616E7A70
"""PostgreSQL's number of the lock that who prepares the schema holds, in whichever pod."""
LOCK_POLL_SECONDS = 0.2
"""Seconds."""
COMMENT_QUERY = "SELECT obj_description(oid, 'pg_namespace') FROM pg_namespace WHERE nspname = :schema"


def is_postgresql(settings: Settings) -> bool:
    return make_url(settings.database_url).get_backend_name() == "postgresql"


def dagster_database_url(settings: Settings, schema: str) -> str:
    """The address of the metadata database as dagster-postgres takes it: by psycopg 2, where no table but those of `schema`
    is seen. Whatever else the address says, it says there too.

    Raises:
        BadConfiguration: the database is not PostgreSQL.
    """
    if not is_postgresql(settings):
        raise BadConfiguration("database.url is no PostgreSQL any more, where Dagster's history is: say `hanzo-ml up`")
    url = make_url(settings.database_url)
    own = url.query.get("options", "")
    only = f"-csearch_path={quote_option(schema)}"
    patient = {name: str(value) for name, value in connection_timeouts(settings.database.connect_seconds).items()}
    query: dict[str, str | tuple[str, ...]] = {"client_encoding": "utf8", **patient, **url.query}
    query["options"] = " ".join([*((own,) if isinstance(own, str) else own), only]).strip()  # of two, the last one counts
    return url.set(drivername="postgresql+psycopg2", query=query).render_as_string(hide_password=False)


def quote_option(name: str) -> str:
    """An identifier within the server's `options`, where a backslash is before whatever would end the word."""
    quoted = name.replace('"', '""')
    return "".join(f"\\{character}" if character in "\\ \t\n" else character for character in f'"{quoted}"')


@contextmanager
def locked_schema(settings: Settings) -> Iterator["DagsterSchema"]:
    """The schema, made where it is missing; nobody else prepares it meanwhile.

    Raises:
        BadConfiguration: it can't be made, or not be reached; the message says what to do.
    """
    database = Database(settings.database_url, settings.database.connect_seconds)
    try:
        with database.read() as connection:  # and written without a transaction, too
            acquire_preparation_lock(connection)
            name = ensure_schema(connection)
            check_search_path(dagster_database_url(settings, name), name)
            yield DagsterSchema(name, connection)
    except SQLAlchemyError as problem:
        raise BadConfiguration(f"Dagster's history can't be prepared in database.url: {first_error_line(problem)}") from None
    finally:
        database.close()


class DagsterSchema:
    """A schema whose comment says what was done to prepare it: so that is known where it was done, whatever becomes of the
    state folder and whichever backup the database is put back to.
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
    """Until no other connection has this lock, which this one has until it is closed.

    By asking, not by a statement that waits: Dagster makes indexes beside others' work, and each of them waits for every
    statement that has begun, and for every transaction.
    """
    while not connection.execute(select(func.pg_try_advisory_lock(PREPARATION_LOCK_ID))).scalar():
        time.sleep(LOCK_POLL_SECONDS)


def ensure_schema(connection: Connection) -> str:
    """The name of the schema, which is there."""
    name = f"{SCHEMA_PREFIX}{connection.execute(select(func.current_schema())).scalar()}"
    if name in inspect(connection).get_schema_names():
        return name
    try:
        connection.execute(CreateSchema(name))
    except SQLAlchemyError as problem:
        quoted = connection.dialect.identifier_preparer.quote(name)
        raise BadConfiguration(
            f"the schema for Dagster's history can't be made: {first_error_line(problem)}: have somebody who may say "
            f"`CREATE SCHEMA {quoted} AUTHORIZATION` and the user of database.url"
        ) from None
    return name


def check_search_path(address: str, schema: str) -> None:
    """Before Dagster works there: where a pooler on the way drops the options, it would take our tables for its own."""
    engine = create_engine(address, poolclass=NullPool)
    with engine.connect() as connection:
        reached = connection.execute(select(func.current_schema())).scalar()
    if reached != schema:
        raise BadConfiguration(
            "what is between here and the server of database.url drops `options`, so that Dagster's history would be in "
            f"the schema {reached} instead of {schema}: name the server itself"
        )


def first_error_line(problem: SQLAlchemyError) -> str:
    return str(getattr(problem, "orig", problem)).partition("\n")[0]
