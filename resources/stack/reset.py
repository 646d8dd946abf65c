"""Delete all data of a laptop or a test: `python -m resources.stack.reset --yes`.

Only `config.yaml` and files that are not Hanzo ML's are kept in the state folder. While the stack runs, only rows and
objects are deleted and its own files are kept: event numbers continue, so that no sensor's cursor is lost, and the engine
serves what it has loaded.
"""

import shutil
import socket
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
from resources.stack.detached_process import LOCK_FILE, is_running, lock_folder

STATE = (
    "hanzo-ml.db",
    "hanzo-ml.db-shm",
    "hanzo-ml.db-wal",
    "objects",
    ".objects-made",
    "jobs",
    "cache",
    "dagster",
    "run-workers",
    "services",
    "engine",
    "gpus",
    "relay",
    "controller.lock",
)
"""Files of Hanzo ML in its state folder, without the configuration. Nothing else is deleted: it may be a user's folder."""
ROOT_URIS = (uris.DATASETS, uris.CHECKPOINTS, uris.RUNS, uris.ARTIFACTS)


def empty_store(settings: Settings) -> int:
    """Reset the store to its initial state; return the number of deleted rows.

    Raises:
        BadConfiguration: it is in production mode, or a job is running; nothing was changed.
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


def delete_state(settings: Settings) -> bool:
    """Delete the files of the stack; return False if it is running."""
    if not settings.home.is_dir():
        return True
    with lock_folder(settings.home) as descriptor:
        services = (settings.home / "services").glob("*")
        if descriptor is None or any(map(is_running, services)) or is_port_open(settings.server.port):
            return False
        for name in STATE:
            path = settings.home / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        (settings.home / LOCK_FILE).unlink()
    return True


def is_port_open(port: int) -> bool:
    """Return whether an API that was started alone may be using the files."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def main() -> int:
    if sys.argv[1:] != ["--yes"]:
        print("error: this deletes every experiment, run, dataset, job and model: confirm with --yes", file=sys.stderr)
        return EXIT_BAD_CONFIGURATION
    try:
        settings = Settings.load()
        rows = pluralize(empty_store(settings), "row")
        stays = "" if delete_state(settings) else "; the stack runs and keeps its files: `hanzo-ml down`, then reset again"
        print(f"emptied: {rows} deleted{stays}")
    except OSError as problem:
        print(f"error: {home_folder_error(problem)}", file=sys.stderr)
        return EXIT_BAD_CONFIGURATION
    except BadConfiguration as problem:
        print(f"error: {problem}", file=sys.stderr)
        return EXIT_BAD_CONFIGURATION
    return 0


if __name__ == "__main__":
    sys.exit(main())
