"""/v1/audit: the calls in the caller's organization. For ml-admin."""

from typing import Annotated, Any, Literal, cast

from fastapi import Query
from typing_extensions import TypedDict

from api.auth.permissions import Permission
from api.dependencies import CallerDep, DatabaseDep
from api.json_bodies import TypedResponse, json_response
from api.routing import Router
from resources.metadata.audit_log import list_calls
from resources.metadata.field_rules import MAX_INT64


class AuditEvent(TypedDict):
    """A call (`audit.call`), or a corrupt file found on reading (`artifact.broken`)."""

    seq: int
    topic: Literal["audit"]
    key: str
    type: Literal["audit.call", "artifact.broken"]
    payload: dict[str, Any]
    created_at: int


class AuditLog(TypedDict):
    events: list[AuditEvent]


router = Router("/v1", tag="v1", strict=False)


@router.get("/audit", Permission.AUDIT_READ)
def audit(
    database: DatabaseDep,
    caller: CallerDep,
    after: Annotated[int, Query(ge=0, le=MAX_INT64)] = 0,
    since: Annotated[int | None, Query(ge=0, le=MAX_INT64)] = None,
    user: str | None = None,
    type: str | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> TypedResponse[AuditLog]:
    """List calls in the order of their records; continue with `after` = the last `seq`.

    `since` is a time in milliseconds. Calls that log to a run are aggregated by minute, with their count.
    """
    with database.read() as connection:
        found = list_calls(connection, caller.organization, after=after, since=since, user=user, type=type, limit=limit)
    return json_response(AuditLog(events=[cast(AuditEvent, vars(event)) for event in found]))
