"""`python -m resources.metadata.migrate`: migrate the metadata database; read its schema revision."""

import sys
from enum import Enum, auto
from pathlib import Path

from sqlalchemy import inspect, select, table
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.sql import column

from recipes.contracts.job import EXIT_BAD_CONFIGURATION, BadConfiguration
from resources.metadata.database import Database
from resources.settings.document import home_folder_error
from resources.settings.settings import Settings

MIGRATIONS = Path(__file__).parent / "migrations"
MIGRATION_LOCK_ID = 0x48616E7A6F
"""PostgreSQL's advisory lock: replicas of a server that start together migrate one after the other."""


class Revision(Enum):
    """Which tables a database has."""

    NONE = auto()
    EARLIER = auto()
    CURRENT = auto()
    """Or a later one: servers of two releases run side by side while one replaces the other."""


def create_if_missing(database: Database) -> Revision:
    """Make the tables of a database that has none. Returns what it had.

    Raises:
        SQLAlchemyError: it does not answer.
        OSError: there is no folder for it, and none can be made.
    """
    found = read_revision(database)
    if found is Revision.NONE:
        database.migrate()
    return found


def read_revision(database: Database) -> Revision:
    """What a database has. Reading it needs no Alembic, which costs a start a tenth of a second.

    Raises:
        SQLAlchemyError: it does not answer.
    """
    address = make_url(database.url)
    if address.get_backend_name() == "sqlite" and not Path(address.database or "").is_file():
        return Revision.NONE
    with database.read() as connection:
        if not inspect(connection).has_table("alembic_version"):
            return Revision.NONE
        found = connection.execute(select(column("version_num")).select_from(table("alembic_version"))).scalar()
    *earlier, _ = sorted(path.name.partition("_")[0] for path in (MIGRATIONS / "versions").glob("*.py"))
    if found is None:
        return Revision.NONE
    return Revision.EARLIER if found in earlier else Revision.CURRENT


def migrate_database(database: Database) -> None:
    """Bring the schema to the newest revision, in one transaction. It keeps what the database has."""
    # A tenth of a second that a server, which never migrates, need not wait for.
    import alembic.command
    import alembic.config

    parsed = make_url(database.url)
    if parsed.get_backend_name() == "sqlite" and parsed.database:
        Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
    config = alembic.config.Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    with database.write() as connection:
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({MIGRATION_LOCK_ID})")
        config.attributes["connection"] = connection
        alembic.command.upgrade(config, "head")


def main() -> int:
    try:
        settings = Settings.load()
        Database(settings.database_url, settings.database.connect_seconds).migrate()
    except OSError as problem:
        print(f"error: {home_folder_error(problem)}", file=sys.stderr)
        return EXIT_BAD_CONFIGURATION
    except BadConfiguration as problem:
        print(f"error: {problem}", file=sys.stderr)
        return EXIT_BAD_CONFIGURATION
    except SQLAlchemyError as problem:
        reason = str(getattr(problem, "orig", problem)).partition("\n")[0]
        print(f"error: the metadata database was left as it was: {reason}", file=sys.stderr)
        return 1
    print("the metadata database has the tables of this release")
    return 0


if __name__ == "__main__":
    sys.exit(main())
