"""`python -m resources.metadata.migrate`: migrate the metadata database; read its schema revision."""

import sys
from enum import Enum, auto
from pathlib import Path

from sqlalchemy import inspect, select, table
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.sql import column

from recipes.contracts.job import EXIT_BAD_CONFIGURATION, BadConfiguration
from resources.metadata.database import MIGRATIONS, Database
from resources.settings.document import home_folder_error
from resources.settings.settings import Settings

# Which tables a database has: none, those of this release, or those of an earlier one.


class Revision(Enum):
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


# `python -m resources.metadata.migrate`: bring the metadata database to this release. It keeps what it has.


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
