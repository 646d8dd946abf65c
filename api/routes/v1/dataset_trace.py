"""/v1/datasets/trace: which models saw a record (row B8)."""

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
    """A record, or a text that stands in records; of these, `limit` are traced and all are counted."""

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
    """Where a record went, or all records that say something. A text in a body stands in no log of requests."""
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
    """Where all records went that say something."""
    return trace_response(database, store, caller, Question(match=match, limit=limit))


def trace_response(database: Database, store: Store, caller: Caller, question: Question) -> Response:
    # numpy is a part of a server's start that it need not wait for.
    from resources.lineage.record_search import trace_matches
    from resources.lineage.trace import Tracer

    tracer = Tracer(database, store, caller.organization)
    with reporting_data_loss("one of the dataset versions"):
        if question.record is not None:
            found: BaseModel = tracer.trace(question.record)
        else:
            found = trace_matches(tracer, question.match or "", question.limit)
    return json_response(found)
