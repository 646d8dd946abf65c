"""`python -m resources.metadata.migrate`: bring the metadata database to this release. It keeps what it has."""

import sys

from sqlalchemy.exc import SQLAlchemyError

from recipes.contracts.job import EXIT_BAD_CONFIGURATION, BadConfiguration
from resources.metadata.database import Database
from resources.settings.document import home_folder_error
from resources.settings.settings import Settings


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
