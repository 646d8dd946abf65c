"""/v1/heartbeats: who takes up what is submitted, and when that was last heard."""

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from api.dependencies import DatabaseOf
from resources.metadata.heartbeats import Heartbeats
from resources.metadata.outbox import now_ms

router = APIRouter(prefix="/v1", tags=["v1"])


@router.get("/heartbeats")
def heartbeats(database: DatabaseOf) -> Response:
    """`sensors` start jobs and check versions; while they are silent, what is submitted waits. One never heard is absent."""
    now = now_ms()
    found = [{**vars(each), "seconds_ago": max(0, now - each.beat_at) / 1000} for each in Heartbeats(database).list()]
    return JSONResponse({"heartbeats": found})
