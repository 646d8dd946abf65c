"""/v1/events: the event log. /v1/addresses and /v1/heartbeats: the parts of this installation."""

from typing import Annotated, Any, Literal, cast

from fastapi import Query, Request
from typing_extensions import TypedDict

from api.auth.permissions import LOCAL, Permission
from api.dependencies import CallerDep, DatabaseDep, SettingsDep
from api.json_bodies import TypedResponse, json_response
from api.routing import Router
from resources.metadata.field_rules import MAX_INT64
from resources.metadata.job_record import mask_payload
from resources.metadata.outbox import now_ms
from resources.metadata.ownership import list_events
from resources.monitoring import service_heartbeats as recorded


class Event(TypedDict):
    """`seq` grows in the order of commits; the payload depends on the type."""

    seq: int
    topic: Literal["jobs", "metrics", "models", "gpu", "datasets"]
    key: str
    type: str
    payload: dict[str, Any]
    created_at: int


class Events(TypedDict):
    events: list[Event]


class Heartbeat(TypedDict):
    name: str
    beat_at: int
    seconds_ago: float


class Heartbeats(TypedDict):
    heartbeats: list[Heartbeat]


class Addresses(TypedDict):
    """URLs of the parts of the installation."""

    dagster: str
    tracking: str
    engine: str


router = Router("/v1", tag="v1", strict=False)


@router.get("/events", Permission.SERVER_READ)
def events(
    database: DatabaseDep,
    caller: CallerDep,
    after: Annotated[int, Query(ge=0, le=MAX_INT64)] = 0,
    type: Annotated[list[str] | None, Query()] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> TypedResponse[Events]:
    """List events in the order of commits, without gaps.

    Continue with `after` = the last `seq`.
    """
    # Without sign-in every caller sees everything, also of organizations from earlier use of the database.
    organization = None if caller is LOCAL else caller.organization
    with database.read() as connection:
        found = list_events(connection, organization, after, type or (), limit)
    events = [cast(Event, {**vars(event), "payload": mask_payload(event.payload)}) for event in found]
    return json_response(Events(events=events))


@router.get("/addresses", Permission.SERVER_READ)
def addresses(request: Request, settings: SettingsDep) -> TypedResponse[Addresses]:
    """Return addresses of the services; Dagster's UI is below this server if it is proxied."""
    dagster = f"{request.base_url}dagster" if settings.dagster.url else settings.dagster_url
    return json_response(Addresses(dagster=dagster, tracking=settings.tracking_uri, engine=settings.engine_url))


@router.get("/heartbeats", Permission.SERVER_READ)
def heartbeats(database: DatabaseDep) -> TypedResponse[Heartbeats]:
    """Return when each service last reported; one that never did is absent.

    `sensors` start jobs and check versions: while they are silent, submitted work waits.
    """
    now = now_ms()
    found = [
        Heartbeat(name=each.name, beat_at=each.beat_at, seconds_ago=max(0, now - each.beat_at) / 1000)
        for each in recorded.Heartbeats(database).list()
    ]
    return json_response(Heartbeats(heartbeats=found))
