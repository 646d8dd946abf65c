"""Background threads of a running server: remove abandoned uploads, keep the planner's statistics current.

No request depends on either, and both may be interrupted at any moment.
"""

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Mapping

from sqlalchemy.exc import SQLAlchemyError

from recipes.abandoned_uploads import ABANDONED_AFTER_SECONDS, remove_abandoned_uploads
from recipes.contracts.job import StoreAddress
from recipes.storage.locations import local_store_root
from resources.metadata.database import Database, analyze_grown_tables

log = logging.getLogger(__name__)

PLANNER_CHECK_SECONDS = 5.0
"""A check reads one row of each table: half a millisecond."""


def start_upload_cleanup(address: StoreAddress, variables: Mapping[str, str], stopped: threading.Event) -> None:
    """Remove abandoned uploads now and each day until `stopped`.

    A server runs for months, and each trainer killed meanwhile may leave a part of a checkpoint.
    """

    def each_day() -> None:
        while not stopped.is_set():
            _remove_abandoned(address, variables)
            stopped.wait(ABANDONED_AFTER_SECONDS)

    threading.Thread(target=each_day, daemon=True).start()


def _remove_abandoned(address: StoreAddress, variables: Mapping[str, str]) -> None:
    try:
        on_s3 = local_store_root(address) is None
        removed = _remove_in_subprocess(address, variables) if on_s3 else remove_abandoned_uploads(address)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        log.warning("remains of interrupted uploads could not be removed: %s", error)
    else:
        log.info("removed %d uploads that killed programs left unfinished", removed)


def _remove_in_subprocess(address: StoreAddress, variables: Mapping[str, str]) -> int:
    command = [sys.executable, "-m", "recipes.abandoned_uploads", address.model_dump_json()]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError((done.stderr.strip().splitlines() or ["it said nothing"])[-1])
    return int(done.stdout)


def start_table_analysis(database: Database, stopped: threading.Event) -> None:
    """Analyze fast-growing tables for PostgreSQL's planner until `stopped`. Does nothing with SQLite."""
    if database.engine.dialect.name == "postgresql":
        threading.Thread(target=_analyze_until_stopped, args=(database, stopped), daemon=True).start()


def _analyze_until_stopped(database: Database, stopped: threading.Event) -> None:
    while not stopped.wait(PLANNER_CHECK_SECONDS):
        try:
            if grown := analyze_grown_tables(database):
                log.info("analyzed %s", ", ".join(grown))
        except SQLAlchemyError as error:  # the database is unavailable, which requests report
            log.debug("tables could not be analyzed: %s", error)
