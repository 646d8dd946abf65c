"""Wait for jobs and checks, and warn when no daemon is running."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

from rich.console import Console

from hanzo_ml.cli.connection import call
from hanzo_ml.cli.output import sanitize_text

ENDED_STATUSES = ("completed", "failed", "cancelled")
POLL_SECONDS = 1.0
SILENCE_SECONDS = 30.0
"""Without a heartbeat, until a warning. Dagster's daemon runs sensors every five seconds."""
T = TypeVar("T")


def poll_until(poll: Callable[[], T | None]) -> T:
    """Poll until `poll` answers.

    Warn on standard error while no Dagster daemon is running, and keep waiting.
    """
    began = checked_at = time.monotonic()
    warned = False
    while (found := poll()) is None:
        time.sleep(POLL_SECONDS)
        if time.monotonic() - checked_at > SILENCE_SECONDS:
            checked_at = time.monotonic()
            note = describe_silence(call("GET", "/v1/heartbeats")["heartbeats"], checked_at - began)
            if note and not warned:
                print_note(note)
            warned = bool(note)
    return found


def print_note(note: str) -> None:
    """Print a note to standard error, apart from the output."""
    Console(stderr=True, highlight=False, soft_wrap=True, markup=False).print(sanitize_text(note))


def describe_silence(heartbeats: list[dict[str, Any]], waited: float) -> str:
    """Warning about a missing heartbeat after `waited` seconds; empty while there is one."""
    ago = next((each["seconds_ago"] for each in heartbeats if each["name"] == "sensors"), None)
    if min(waited, waited if ago is None else ago) <= SILENCE_SECONDS:
        return ""
    heard = "was never heard" if ago is None else f"was last heard {ago:.0f} s ago"
    return f"nothing starts this: Dagster's daemon {heard}. Start it with `hanzo-ml up`; this command keeps waiting"


def wait_for_end(job_id: str) -> dict[str, Any]:
    """Wait until a job has ended. Interrupting this does not affect the job."""

    def poll() -> dict[str, Any] | None:
        job: dict[str, Any] = call("GET", f"/v1/jobs/{job_id}")
        return job if job["status"] in ENDED_STATUSES else None

    return poll_until(poll)


def wait_for_start(job_id: str) -> dict[str, Any]:
    """Wait until a job is no longer queued.

    What it waits for is printed to standard error.
    """
    last_reason = ""

    def poll() -> dict[str, Any] | None:
        nonlocal last_reason
        job: dict[str, Any] = call("GET", f"/v1/jobs/{job_id}")
        if job["status"] != "queued":
            return job
        reason = job["reason"] or "it starts within seconds, or when a running job ends"
        if reason != last_reason:
            print_note(f"{job_id} is queued: {reason}")
            last_reason = reason
        return None

    return poll_until(poll)
