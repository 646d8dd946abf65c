"""Dagster's daemon, which begins anew where the clock was put back.

Its threads wait for a time of day. With the clock put back by two hours below them none looked for as long, nor did a run
leave the queue; and for `up` the daemon was one that runs.
"""

import os
import runpy
import sys
import threading
import time
from collections.abc import Callable

STEP_SECONDS = 10.0
"""A clock that is corrected by less than that holds up nothing for longer than a new beginning would."""
EVERY_SECONDS = 2.0


def begin_anew_where_put_back(
    clock: Callable[[], float] = time.time,
    steady: Callable[[], float] = time.monotonic,
    every: float = EVERY_SECONDS,
) -> None:
    """Watch the clock from a thread: once it is put back, this process executes its own command again. It keeps its id and
    its lock; what it was at is broken off, as by a kill.
    """

    def watch() -> None:
        ahead = clock() - steady()
        while True:
            time.sleep(every)
            before, ahead = ahead, clock() - steady()
            if ahead < before - STEP_SECONDS:
                print(f"the clock was put back by {before - ahead:.0f} s: the daemon begins anew", flush=True)
                os.execv(sys.executable, sys.orig_argv)

    threading.Thread(target=watch, name="clock", daemon=True).start()


if __name__ == "__main__":
    begin_anew_where_put_back()
    runpy.run_module("dagster._daemon", run_name="__main__", alter_sys=True)
