"""Retry schedules for tenacity: when to try again, and when to give up.

Waits that must hear SIGTERM or the end of their owner do not belong here: tenacity sleeps through both.
"""

from typing import TypedDict

from tenacity import stop_after_attempt, stop_after_delay, wait_chain, wait_fixed, wait_random_exponential
from tenacity.stop import stop_base
from tenacity.wait import wait_base


class Schedule(TypedDict):
    """Arguments of `tenacity.Retrying` and `AsyncRetrying`; the last error is raised as it is."""

    wait: wait_base
    stop: stop_base
    reraise: bool


def after_pauses(*seconds: float) -> Schedule:
    """One attempt, then one more after each pause."""
    return Schedule(
        wait=wait_chain(*map(wait_fixed, seconds or (0.0,))), stop=stop_after_attempt(1 + len(seconds)), reraise=True
    )


def every(seconds: float, limit_seconds: float) -> Schedule:
    """An attempt after each pause, until the limit since the first one has passed."""
    return Schedule(wait=wait_fixed(seconds), stop=stop_after_delay(limit_seconds), reraise=True)


def with_backoff(first_seconds: float, longest_seconds: float, limit_seconds: float) -> Schedule:
    """Attempts after pauses that double, with jitter, until the limit since the first one has passed."""
    return Schedule(
        wait=wait_random_exponential(multiplier=first_seconds, max=longest_seconds),
        stop=stop_after_delay(limit_seconds),
        reraise=True,
    )
