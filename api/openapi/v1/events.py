"""The event log and the audit log, and what is known of the installation (rows Q1-Q8, X4)."""

from typing import Any, Literal

from api.schemas.mlflow.responses import Message


class Event(Message):
    """`seq` grows in the order of commits; the payload is its type's own."""

    seq: int
    topic: Literal["jobs", "metrics", "models", "gpu", "datasets"]
    key: str
    type: str
    payload: dict[str, Any]
    created_at: int


class Events(Message):
    events: list[Event]


class AuditEvent(Message):
    """A call (`audit.call`), or damage to a file that was found as it was read (`artifact.broken`)."""

    seq: int
    topic: Literal["audit"]
    key: str
    type: Literal["audit.call", "artifact.broken"]
    payload: dict[str, Any]
    created_at: int


class AuditLog(Message):
    events: list[AuditEvent]


class Heartbeat(Message):
    name: str
    beat_at: int
    seconds_ago: float


class Heartbeats(Message):
    heartbeats: list[Heartbeat]


class Addresses(Message):
    """Where the parts of the installation answer."""

    dagster: str
    tracking: str
    engine: str
