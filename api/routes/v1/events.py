"""/v1/events: the event log (row Q8), and /v1/addresses: where the parts of this installation answer."""

from typing import Annotated

from fastapi import APIRouter, Query, Response
from fastapi.responses import JSONResponse

from api.auth.permissions import LOCAL
from api.dependencies import CallerOf, DatabaseOf, SettingsOf
from resources.metadata.heartbeats import Heartbeats
from resources.metadata.outbox import now_ms
from resources.metadata.scope_events import events_of
from resources.metadata.told_config import told_payload
from resources.metadata.tracking_rules import MAX_INT64

router = APIRouter(prefix="/v1", tags=["v1"])


@router.get("/events")
def events(
    database: DatabaseOf,
    caller: CallerOf,
    after: Annotated[int, Query(ge=0, le=MAX_INT64)] = 0,
    type: Annotated[list[str] | None, Query()] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Response:
    """Events in the order of their commits. Ask again with `after` = the last `seq`; nothing is ever skipped."""
    # Without sign-in, everybody sees everything, whichever organizations a database holds from other days.
    organization = None if caller is LOCAL else caller.organization
    with database.read() as connection:
        found = events_of(connection, organization, after, type or (), limit)
    return JSONResponse({"events": [{**vars(event), "payload": told_payload(event.payload)} for event in found]})


@router.get("/addresses")
def addresses(settings: SettingsOf) -> Response:
    return JSONResponse({"dagster": settings.dagster_url, "tracking": settings.tracking_uri, "engine": settings.engine_url})


@router.get("/heartbeats")
def heartbeats(database: DatabaseOf) -> Response:
    """`sensors` start jobs and check versions; while they are silent, what is submitted waits. One never heard is absent."""
    now = now_ms()
    found = [{**vars(each), "seconds_ago": max(0, now - each.beat_at) / 1000} for each in Heartbeats(database).list()]
    return JSONResponse({"heartbeats": found})
