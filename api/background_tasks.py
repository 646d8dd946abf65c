"""While a server runs, its database's planner is told of tables that grow fast. Nobody waits for it."""

import logging
import threading

from sqlalchemy.exc import SQLAlchemyError

from resources.metadata.database import Database
from resources.metadata.planner_statistics import analyze_what_has_grown

log = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""A look reads one row for each table: half a millisecond."""


def keep_in_background(database: Database, stopped: threading.Event) -> None:
    """Look again and again until `stopped`. There is nothing to do where the database is SQLite."""
    if database.engine.dialect.name == "postgresql":
        threading.Thread(target=_keep, args=(database, stopped), daemon=True).start()


def _keep(database: Database, stopped: threading.Event) -> None:
    while not stopped.wait(LOOK_SECONDS):
        try:
            if grown := analyze_what_has_grown(database):
                log.info("analyzed %s", ", ".join(grown))
        except SQLAlchemyError as error:  # it is away, and whoever asks it something says so
            log.debug("tables could not be analyzed: %s", error)
