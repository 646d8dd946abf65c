"""/v1/audit: who called what in the caller's organization (rows X4, Q7). For ml-admin."""

from typing import Annotated

from fastapi import APIRouter, Query, Response
from fastapi.responses import JSONResponse

from api.dependencies import CallerOf, DatabaseOf
from resources.metadata.audit import calls_of
from resources.metadata.tracking_rules import MAX_INT64

router = APIRouter(prefix="/v1", tags=["v1"])


@router.get("/audit")
def audit(
    database: DatabaseOf,
    caller: CallerOf,
    after: Annotated[int, Query(ge=0, le=MAX_INT64)] = 0,
    since: Annotated[int | None, Query(ge=0, le=MAX_INT64)] = None,
    user: str | None = None,
    type: str | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Response:
    """Calls in the order of their records, `since` a time in milliseconds. Ask again with `after` = the last `seq`.

    Calls that log to a run stand there with their count, those of a minute together.
    """
    with database.read() as connection:
        found = calls_of(connection, caller.organization, after=after, since=since, user=user, type=type, limit=limit)
    return JSONResponse({"events": [vars(event) for event in found]})
