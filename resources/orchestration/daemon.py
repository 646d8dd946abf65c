"""Dagster's daemon, restarted whenever the clock is set back.

Its threads wait for a time of day: after the clock was set back by two hours, no sensor ran and no run left the queue for as
long, while the daemon appeared healthy. Sensors count their interval from their last tick, which may then be in the future.

On PostgreSQL one daemon leads and others stand by: a rolling update runs two of them for a while.
"""

import logging
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import dagster as dg
from dagster._core.scheduler.instigation import SensorInstigatorData
from dagster._daemon.controller import all_daemons_live
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from resources.compute.kubernetes.controller.leader import LeadershipLost, lead
from resources.metadata.database import Database
from resources.orchestration.postgres_schema import is_postgresql
from resources.settings.settings import Settings
from resources.stack.liveness import liveness_file, report_alive

MAX_ROLLBACK_SECONDS = 10.0
"""Smaller corrections of the clock delay work less than a restart would."""
CHECK_INTERVAL_SECONDS = 2.0
ADVISORY_LOCK = 57_000_004
"""PostgreSQL advisory lock held by the leading daemon."""
LIVENESS_INTERVAL_SECONDS = 30.0
HEARTBEAT_SECONDS = 300
"""The daemon counts as hung when a heartbeat of one of its threads is older."""


def restart_on_clock_rollback(
    clock: Callable[[], float] = time.time,
    steady: Callable[[], float] = time.monotonic,
    interval_seconds: float = CHECK_INTERVAL_SECONDS,
) -> None:
    """Watch the clock from a thread; re-execute this process when it is set back.

    Process id and lock stay the same; work in progress is interrupted, as by a kill.
    """

    def watch() -> None:
        offset = clock() - steady()
        while True:
            time.sleep(interval_seconds)
            previous, offset = offset, clock() - steady()
            if offset < previous - MAX_ROLLBACK_SECONDS:
                print(f"the clock was set back by {previous - offset:.0f} s: restarting the daemon", flush=True)
                os.execv(sys.executable, sys.orig_argv)

    threading.Thread(target=watch, name="clock", daemon=True).start()


def reset_future_ticks(instance: dg.DagsterInstance, now: float) -> None:
    """Reset sensors whose last tick is later than `now`, so that they run at once.

    They count their interval from the last tick, also if the clock was set back while the stack was down.
    """
    for state in instance.all_instigator_state():
        data = state.instigator_data
        if not isinstance(data, SensorInstigatorData):
            continue
        tick_fields = ("last_tick_timestamp", "last_tick_start_timestamp")
        if future_fields := {tick_field: None for tick_field in tick_fields if (getattr(data, tick_field) or 0) > now}:
            instance.update_instigator_state(state.with_data(data._replace(**future_fields)))


def install_root_handler() -> None:
    """Give the root logger its own handler, restricted to its own messages.

    A library that logs through the root logger, as dagster-postgres does when it loses a connection, makes Python install a
    default handler: from then on each message of Dagster was printed twice.
    """
    handler = logging.StreamHandler()
    handler.addFilter(lambda record: record.name == logging.root.name)
    logging.root.addHandler(handler)


@contextmanager
def lead_daemons(settings: Settings) -> Iterator[None]:
    """Wait until no other daemon leads on this database; restart once leadership is uncertain."""
    if not is_postgresql(settings):  # all processes share a machine, where `hanzo-ml up` starts one daemon
        yield
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # the first process of a container ignores it otherwise
    waiting = partial(report_alive, liveness_file(settings.home, "dagster-daemon"))
    seconds, lock_file = settings.database.connect_seconds, settings.home / "daemon.lock"
    leading = lead(
        settings.database_url,
        seconds,
        lock_file,
        threading.Event(),
        advisory_lock=ADVISORY_LOCK,
        waiting=waiting,
    )
    with leading as database:
        restart_on_lost_leadership(database)
        yield


def restart_on_lost_leadership(database: Database, interval_seconds: float = CHECK_INTERVAL_SECONDS) -> None:
    """Re-execute this process once the database has ended the session that holds the lock."""

    def watch() -> None:
        with suppress(LeadershipLost, SQLAlchemyError):
            while True:
                time.sleep(interval_seconds)
                with database.read() as connection:
                    connection.execute(text("SELECT 1"))
        print("another daemon may lead: this one waits for the lock", flush=True)
        os.execv(sys.executable, sys.orig_argv)

    threading.Thread(target=watch, name="leadership", daemon=True).start()


def report_liveness(instance: dg.DagsterInstance, file: Path, interval_seconds: float = LIVENESS_INTERVAL_SECONDS) -> None:
    """Touch `file` from a thread while all threads of the daemon send heartbeats."""

    def watch() -> None:
        started = time.time()
        while True:
            if time.time() - started < HEARTBEAT_SECONDS or are_daemons_alive(instance):
                report_alive(file)
            time.sleep(interval_seconds)

    threading.Thread(target=watch, name="liveness", daemon=True).start()


def are_daemons_alive(instance: dg.DagsterInstance) -> bool:
    """Whether all threads send heartbeats; True also during a database outage, which restarting cannot fix."""
    try:
        return bool(all_daemons_live(instance, heartbeat_tolerance_seconds=HEARTBEAT_SECONDS))
    except SQLAlchemyError:
        return True


if __name__ == "__main__":
    install_root_handler()
    restart_on_clock_rollback()
    loaded = Settings.load()
    with lead_daemons(loaded), dg.DagsterInstance.get() as instance:
        reset_future_ticks(instance, time.time())
        report_liveness(instance, liveness_file(loaded.home, "dagster-daemon"))
        runpy.run_module("dagster._daemon", run_name="__main__", alter_sys=True)
