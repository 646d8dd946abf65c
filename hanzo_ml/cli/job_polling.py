"""Waiting for what the asset graph does, and saying so where nobody is there to do it."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

from rich.console import Console

from hanzo_ml.cli.connection import call
from hanzo_ml.cli.terminal import plain

ENDED = ("completed", "failed", "cancelled")
POLL_SECONDS = 1.0
PATIENCE_SECONDS = 30.0
"""Of silence: Dagster's daemon looks at its sensors every five."""
T = TypeVar("T")


def wait_until(look: Callable[[], T | None]) -> T:
    """The first answer of `look`. Where nobody takes up work, that is said on standard error, and waited on: once it goes
    on, so does what was submitted."""
    began = listened = time.monotonic()
    said = False
    while (found := look()) is None:
        time.sleep(POLL_SECONDS)
        if time.monotonic() - listened > PATIENCE_SECONDS:
            listened = time.monotonic()
            note = silence(call("GET", "/v1/heartbeats")["heartbeats"], listened - began)
            if note and not said:
                tell(note)
            said = bool(note)
    return found


def tell(note: str) -> None:
    """Say on standard error what is no output."""
    Console(stderr=True, highlight=False, soft_wrap=True, markup=False).print(plain(note))


def silence(heartbeats: list[dict[str, Any]], waited: float) -> str:
    """What to say of the sensors' heartbeat after `waited` seconds; nothing while it is heard."""
    ago = next((each["seconds_ago"] for each in heartbeats if each["name"] == "sensors"), None)
    if min(waited, waited if ago is None else ago) <= PATIENCE_SECONDS:
        return ""
    heard = "was never heard" if ago is None else f"was last heard {ago:.0f} s ago"
    return f"nobody takes this up: Dagster's daemon {heard}. Start it with `hanzo-ml up`: this waits on, and nothing is lost"


def ended_job(job_id: str) -> dict[str, Any]:
    """The job, once it has ended. It goes on where nobody waits for it."""

    def look() -> dict[str, Any] | None:
        job: dict[str, Any] = call("GET", f"/v1/jobs/{job_id}")
        return job if job["status"] in ENDED else None

    return wait_until(look)


def begun_job(job_id: str) -> dict[str, Any]:
    """The job, once it is no longer queued. What it waits for is said on standard error."""
    told = ""

    def look() -> dict[str, Any] | None:
        nonlocal told
        job: dict[str, Any] = call("GET", f"/v1/jobs/{job_id}")
        if job["status"] != "queued":
            return job
        reason = job["reason"] or "it starts within seconds, or once what runs before it has left it a place"
        if reason != told:
            tell(f"{job_id} is queued: {reason}")
            told = reason
        return None

    return wait_until(look)
