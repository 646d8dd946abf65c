"""`python -m resources.stack.reset --yes`: empty the store of a laptop or a test: every row, every object, every job's
folder.

It works beside a running stack: events go on being numbered, so that no sensor's place in them is lost. What Dagster wrote
of its own runs stays, and the engine serves what it has loaded until it is ended.
"""

import shutil
import sys

from sqlalchemy import delete, select

from recipes.contracts.job import EXIT_BAD_CONFIGURATION, BadConfiguration
from recipes.contracts.quantities import pluralize
from recipes.storage import uris
from recipes.storage.artifact_store import Store
from resources.metadata.database import Database
from resources.metadata.registry.model_names import ModelKey
from resources.metadata.tables import jobs, registered_models, schema
from resources.metadata.tracking.experiments import Experiments
from resources.settings.document import home_folder_error
from resources.settings.settings import Settings

ROOT_URIS = (uris.DATASETS, uris.CHECKPOINTS, uris.RUNS, uris.ARTIFACTS)


def empty_store(settings: Settings) -> int:
    """Empty the store and leave it as a first start does. Returns how many rows there were.

    Raises:
        BadConfiguration: it is in production, or a job is running; nothing was touched.
    """
    if settings.auth.verify_tokens:
        raise BadConfiguration("this store is in production mode (auth.verify_tokens is true): it is never emptied")
    database = Database(settings.database_url, settings.database.connect_seconds)
    database.migrate()
    with database.write() as connection:
        running = connection.execute(select(jobs.c.id).where(jobs.c.status == "running")).scalars().first()
        if running is not None:
            raise BadConfiguration(f"job {running} is running: `hanzo-ml job cancel {running}` first")
        keys = connection.execute(select(registered_models.c.organization, registered_models.c.name))
        places = [ModelKey(*key).folder_uri for key in keys]
        # Children before their parents.
        rows = sum(connection.execute(delete(table)).rowcount for table in reversed(schema.sorted_tables))
        Experiments(database).ensure_default(connection=connection)
    store = Store(settings.store, settings.storage.variables)
    for root in (*ROOT_URIS, *places):
        store.delete(root)
    for folder in ("jobs", "cache"):
        shutil.rmtree(settings.home / folder, ignore_errors=True)
    database.close()
    return rows


def main() -> int:
    if sys.argv[1:] != ["--yes"]:
        print("error: this deletes every experiment, run, dataset, job and model: say --yes", file=sys.stderr)
        return EXIT_BAD_CONFIGURATION
    try:
        print(f"emptied: {pluralize(empty_store(Settings.load()), 'row')} deleted")
    except OSError as problem:
        print(f"error: {home_folder_error(problem)}", file=sys.stderr)
        return EXIT_BAD_CONFIGURATION
    except BadConfiguration as problem:
        print(f"error: {problem}", file=sys.stderr)
        return EXIT_BAD_CONFIGURATION
    return 0


if __name__ == "__main__":
    sys.exit(main())
