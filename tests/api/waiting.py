"""Wait for asynchronous events."""

import time
from collections.abc import Callable

WITHIN = 60.0


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN
    while not condition():
        assert time.monotonic() < deadline, "the clients do not get on"
        time.sleep(0.01)
