"""`python -m resources.orchestration.migrate`: migrate both databases, and configure this pod's Dagster.

Every pod of the control plane runs this before it starts; concurrent ones wait for each other. A database that a later
release has migrated stays unchanged, because during an update pods of both releases run side by side.
"""

import sys
import time

from rich.console import Console
from sqlalchemy.exc import SQLAlchemyError

from recipes.contracts.job import EXIT_BAD_CONFIGURATION, BadConfiguration
from resources.metadata.database import Database
from resources.metadata.migrate import Revision, read_revision
from resources.orchestration.instance import migrate_dagster
from resources.settings.settings import Settings

DATABASE_SECONDS = 300.0
"""How long to wait for a database that may still be starting."""
RETRY_SECONDS = 1.0


def migrate(settings: Settings, console: Console) -> None:
    """Raises SQLAlchemyError or BadConfiguration if the database refuses or does not respond in time."""
    database = Database(settings.database_url, settings.database.connect_seconds)
    try:
        wait_for_database(database, console)
        if read_revision(database) is not Revision.CURRENT:
            database.migrate()
    finally:
        database.close()
    settings.run_workers.mkdir(parents=True, exist_ok=True)
    migrate_dagster(settings, console)


def wait_for_database(database: Database, console: Console) -> None:
    deadline = time.monotonic() + DATABASE_SECONDS
    while True:
        try:
            database.engine.connect().close()
            return
        except SQLAlchemyError as problem:
            if time.monotonic() > deadline:
                raise
            console.print(f"waiting for the database: {first_line(problem)}", markup=False, soft_wrap=True)
        time.sleep(RETRY_SECONDS)


def first_line(problem: SQLAlchemyError) -> str:
    return str(getattr(problem, "orig", problem)).partition("\n")[0]


def main() -> int:
    console = Console(stderr=True)
    try:
        migrate(Settings.load(), console)
    except BadConfiguration as problem:
        print(f"hanzo-ml: {problem}", file=sys.stderr)
        return EXIT_BAD_CONFIGURATION
    except SQLAlchemyError as problem:
        print(f"hanzo-ml: the metadata database was not changed: {first_line(problem)}", file=sys.stderr)
        return 1
    print("both databases have the tables of this release")
    return 0


if __name__ == "__main__":
    sys.exit(main())
