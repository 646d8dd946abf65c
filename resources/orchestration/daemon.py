"""Dagster's daemon, which begins anew where the clock was put back.

Its threads wait for a time of day. With the clock put back by two hours below them none looked for as long, nor did a run
leave the queue; and for `up` the daemon was one that runs. Sensors wait for their interval from a look that may be to come.
"""

import logging
import os
import runpy
import sys
import threading
import time
from collections.abc import Callable

import dagster as dg
from dagster._core.scheduler.instigation import SensorInstigatorData

MAX_ROLLBACK_SECONDS = 10.0
"""A clock that is corrected by less than that holds up nothing for longer than a new beginning would."""
CHECK_INTERVAL_SECONDS = 2.0


def restart_on_clock_rollback(
    clock: Callable[[], float] = time.time,
    steady: Callable[[], float] = time.monotonic,
    interval_seconds: float = CHECK_INTERVAL_SECONDS,
) -> None:
    """Watch the clock from a thread: once it is put back, this process executes its own command again. It keeps its id and
    its lock; what it was at is broken off, as by a kill.
    """

    def watch() -> None:
        offset = clock() - steady()
        while True:
            time.sleep(interval_seconds)
            previous, offset = offset, clock() - steady()
            if offset < previous - MAX_ROLLBACK_SECONDS:
                print(f"the clock was put back by {previous - offset:.0f} s: the daemon begins anew", flush=True)
                os.execv(sys.executable, sys.orig_argv)

    threading.Thread(target=watch, name="clock", daemon=True).start()


def reset_future_ticks(instance: dg.DagsterInstance, now: float) -> None:
    """Let each sensor look at once whose last look is later than `now`: it waits for its interval from that one, whatever
    database holds it, also where the clock was put back while nothing ran.
    """
    for state in instance.all_instigator_state():
        data = state.instigator_data
        if not isinstance(data, SensorInstigatorData):
            continue
        tick_fields = ("last_tick_timestamp", "last_tick_start_timestamp")
        if future_fields := {tick_field: None for tick_field in tick_fields if (getattr(data, tick_field) or 0) > now}:
            instance.update_instigator_state(state.with_data(data._replace(**future_fields)))


def install_root_handler() -> None:
    """What a library tells no logger of its own, as dagster-postgres does of a lost connection, has Python give all loggers
    a way to print: whatever Dagster said after that was printed twice. So there is one, for such words alone.
    """
    handler = logging.StreamHandler()
    handler.addFilter(lambda record: record.name == logging.root.name)
    logging.root.addHandler(handler)


if __name__ == "__main__":
    install_root_handler()
    restart_on_clock_rollback()
    with dg.DagsterInstance.get() as instance:
        reset_future_ticks(instance, time.time())
    runpy.run_module("dagster._daemon", run_name="__main__", alter_sys=True)
