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
"""PostgreSQL's advisory lock, so that replicas that start together migrate one after another."""


class Revision(Enum):
    """The state of a database's schema."""

    NONE = auto()
    EARLIER = auto()
    CURRENT = auto()
    """Or later: during a rolling upgrade, servers of two releases use the same database."""


def create_if_missing(database: Database) -> Revision:
    """Create the tables of a database that has none. Returns the previous state.

    Raises:
        SQLAlchemyError: the database does not respond.
        OSError: its folder does not exist and cannot be created.
    """
    found = read_revision(database)
    if found is Revision.NONE:
        database.migrate()
    return found


def read_revision(database: Database) -> Revision:
    """Return a schema's state without importing Alembic, which takes a tenth of a second.

    Raises:
        SQLAlchemyError: the database does not respond.
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
    """Upgrade the schema to the newest revision in one transaction, keeping all data."""
    # Imported here: it costs a tenth of a second that a server, which never migrates, need not spend.
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
        print(f"error: the metadata database was not changed: {reason}", file=sys.stderr)
        return 1
    print("the metadata database has the schema of this release")
    return 0


if __name__ == "__main__":
    sys.exit(main())
