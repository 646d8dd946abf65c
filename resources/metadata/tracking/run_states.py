"""The states of a run, and the effects of a state change. Pure: no database."""

import random
from dataclasses import dataclass
from typing import Any

from resources.errors import invalid
from resources.metadata.field_rules import MAX_RUN_NAME, check_length, checked_text
from resources.metadata.outbox import now_ms

STATUSES = ("queued", "running", "completed", "failed", "cancelled")
ENDED_STATUSES = frozenset({"completed", "failed", "cancelled"})
ADJECTIVES = ("able", "bold", "bright", "calm", "capable", "gentle", "kindly", "nimble", "orderly", "polite", "rare", "wise")
"""A subset of MLflow's words."""
NOUNS = ("badger", "crane", "falcon", "heron", "ibex", "lark", "lynx", "marten", "otter", "raven", "stoat", "wren")


@dataclass(frozen=True)
class Run:
    id: str
    experiment_id: int
    name: str
    status: str
    start_time: int | None
    end_time: int | None
    user_id: str
    organization: str
    artifact_uri: str
    lifecycle_stage: str
    revision: int


def status_change(run: Run, status: str | None, end_time: int | None) -> dict[str, Any]:
    """Return the changed columns. `end_time` defaults to now for ended runs, else to none."""
    values: dict[str, Any] = {}
    if end_time is not None:
        values["end_time"] = end_time
    if status is None or checked_status(status) == run.status:
        return values
    values["status"] = status
    if end_time is None:
        values["end_time"] = now_ms() if status in ENDED_STATUSES else None
    if run.status == "queued" and status == "running":
        values["start_time"] = now_ms()
    return values


def checked_status(status: str) -> str:
    if status not in STATUSES:
        raise invalid(
            f"Invalid value {status!r:.100} for parameter 'status' supplied: it must be one of {', '.join(STATUSES)}"
        )
    return status


def choose_name(name: str | None, tag: str | None) -> str:
    if name and tag and name != tag:
        raise invalid(
            "Both 'run_name' argument and 'mlflow.runName' tag are specified, but with "
            f"different values (run_name='{name}', mlflow.runName='{tag}')."
        )
    return checked_run_name(name or tag or generate_name())


def generate_name() -> str:
    """Return a pronounceable name for an unnamed run or model."""
    return f"{random.choice(ADJECTIVES)}-{random.choice(NOUNS)}-{random.randrange(1000)}"


def checked_run_name(name: str) -> str:
    check_length("run_name", name, MAX_RUN_NAME)
    return checked_text(name, "run_name")
