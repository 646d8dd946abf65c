"""What a command left is stored, however long the store is away: else all that it did would be done once more."""

import math
import time
from collections.abc import Callable
from itertools import chain, repeat
from pathlib import Path

from recipes.runner import say
from recipes.storage.buckets import StoreFull, StoreUnavailable
from recipes.storage.manifest import Artifact

STORE_PAUSES = (1.0, 5.0, 30.0, 60.0, 300.0, 600.0)
"""Seconds between two attempts to store what a command left; the last for all that follow."""
STOPPING_PAUSE = 10.0
GRACE_SECONDS = 240.0
"""Of one that is asked to stop, such as at its deadline: how long it still tries. A pod is killed after 300."""


def patiently(
    leave: Callable[[], dict[str, Artifact]], checkpoints: Path, asked_to_stop: Callable[[], bool]
) -> dict[str, Artifact]:
    """Store what a command left that has ended. Without that it would do all it did once more, or have done it for nothing.

    It is tried until the job is asked to stop, which it is at its deadline at the latest, and then for its grace.

    Raises:
        StoreFull, StoreUnavailable: the grace is over; what the command left stays on this machine.
        Apart: other nodes have not ended.
    """
    ends = math.inf
    pauses = chain(STORE_PAUSES, repeat(STORE_PAUSES[-1]))
    while True:
        try:
            return leave()
        except (StoreFull, StoreUnavailable) as error:
            stopping = asked_to_stop()
            ends = min(ends, time.monotonic() + GRACE_SECONDS) if stopping else ends
            if time.monotonic() >= ends:
                raise
            seconds = min(next(pauses), STOPPING_PAUSE if stopping else math.inf)
            say(f"what the command left in {checkpoints} cannot be stored, and is tried again in {seconds:g} s: {error}")
        until = time.monotonic() + seconds
        while time.monotonic() < until and asked_to_stop() == stopping:  # who is asked meanwhile tries at once
            time.sleep(min(seconds, 1.0))
