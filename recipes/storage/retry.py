"""Retry schedules for tenacity.

Waits that must react to SIGTERM or to the end of their owner do not belong here: tenacity sleeps through both.
"""

from typing import TypedDict

from tenacity import stop_after_attempt, stop_after_delay, wait_chain, wait_fixed, wait_random_exponential
from tenacity.stop import stop_base
from tenacity.wait import wait_base


class Schedule(TypedDict):
    """Arguments of `tenacity.Retrying` and `AsyncRetrying`; the last error is raised unchanged."""

    wait: wait_base
    stop: stop_base
    reraise: bool


def after_pauses(*seconds: float) -> Schedule:
    """One attempt, then one more after each of these pauses."""
    return Schedule(
        wait=wait_chain(*map(wait_fixed, seconds or (0.0,))), stop=stop_after_attempt(1 + len(seconds)), reraise=True
    )


def every(seconds: float, limit_seconds: float) -> Schedule:
    """Attempts at a fixed interval, until `limit_seconds` have passed since the first one."""
    return Schedule(wait=wait_fixed(seconds), stop=stop_after_delay(limit_seconds), reraise=True)


def with_backoff(first_seconds: float, longest_seconds: float, limit_seconds: float) -> Schedule:
    """Attempts with exponential backoff and jitter, until `limit_seconds` since the first one."""
    return Schedule(
        wait=wait_random_exponential(multiplier=first_seconds, max=longest_seconds),
        stop=stop_after_delay(limit_seconds),
        reraise=True,
    )
