"""/v1/datasets/trace: which models were trained on a record."""

from typing import Annotated, Any

from fastapi import Query, Response
from pydantic import BaseModel, ConfigDict, Field

from api.auth.permissions import Caller, Permission
from api.dependencies import CallerDep, DatabaseDep, StoreDep
from api.json_bodies import json_response
from api.routing import Audit, Router
from api.schemas.v1.datasets import reporting_data_loss
from recipes.storage.artifact_store import Store
from resources.errors import invalid
from resources.metadata.database import Database

router = Router("/v1/datasets/trace", tag="v1")

DEFAULT_LIMIT, MAX_LIMIT = 10, 100


class Question(BaseModel):
    """A record, or a text to find; of its matches, `limit` are traced, all counted."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    record: dict[str, Any] | None = None
    match: str | None = None
    limit: Annotated[int, Field(ge=1, le=MAX_LIMIT)] = DEFAULT_LIMIT


@router.post(
    "",
    Permission.DATASETS_READ,
    read_only=True,
    audit=Audit.EACH,
    response="resources.lineage.trace:Trace | resources.lineage.record_search:Matches",
)
def trace(question: Question, database: DatabaseDep, store: StoreDep, caller: CallerDep) -> Response:
    """Trace a record, or records that contain a text; bodies are not logged."""
    if (question.record is None) == (question.match is None):
        raise invalid("send a 'record' or a text to 'match', and not both")
    return trace_response(database, store, caller, question)


@router.get("", Permission.DATASETS_READ, audit=Audit.EACH, response="resources.lineage.record_search:Matches")
def trace_match(
    match: str,
    database: DatabaseDep,
    store: StoreDep,
    caller: CallerDep,
    limit: Annotated[int, Query(ge=1, le=MAX_LIMIT)] = DEFAULT_LIMIT,
) -> Response:
    """Trace all records that contain a text."""
    return trace_response(database, store, caller, Question(match=match, limit=limit))


def trace_response(database: Database, store: Store, caller: Caller, question: Question) -> Response:
    # Imported late: numpy would slow the server's start.
    from resources.lineage.record_search import trace_matches
    from resources.lineage.trace import Tracer

    tracer = Tracer(database, store, caller.organization)
    with reporting_data_loss("one of the dataset versions"):
        if question.record is not None:
            found: BaseModel = tracer.trace(question.record)
        else:
            found = trace_matches(tracer, question.match or "", question.limit)
    return json_response(found)
