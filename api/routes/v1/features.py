"""/v1/features: what a dataset version's features are of a key, and of rows that nobody prepared (row C5)."""

from typing import Annotated, Any

from fastapi import APIRouter, Body, Query, Request, Response
from fastapi.responses import JSONResponse

from api.dependencies import CallerOf, DatabaseOf, StoreOf
from api.schemas.v1.datasets import reading
from api.strict_json import StrictRoute
from resources.features import features_of, looked_up, version_with_features

router = APIRouter(prefix="/v1/features", tags=["v1"], route_class=StrictRoute)

MOST_ROWS = 1000
Version = Annotated[int | None, Query(ge=1, le=999_999_999, description="by default the newest version with features")]


@router.get("/{name}/{key:path}")
def get(
    request: Request, name: str, key: str, database: DatabaseOf, store: StoreOf, caller: CallerOf, version: Version = None
) -> Response:
    """The features of a key, as its last record in the version has them."""
    found = version_with_features(database, name, caller.organization, version)
    request.state.dataset_id = found.id  # for the audit log
    with reading(f"dataset {found.reference}"):
        features = looked_up(store, found, key)
    return JSONResponse({"dataset": found.reference, "key": key, "features": features})


@router.post("/{name}/transform")
def transform(
    request: Request,
    name: str,
    rows: Annotated[list[dict[str, Any]], Body(max_length=MOST_ROWS)],
    database: DatabaseOf,
    store: StoreOf,
    caller: CallerOf,
    version: Version = None,
) -> Response:
    """The features of raw rows, in their order: the same numbers that a preparation writes beside equal records."""
    found = version_with_features(database, name, caller.organization, version)
    request.state.dataset_id = found.id  # for the audit log
    with reading(f"dataset {found.reference}"):
        features = features_of(store, found).of_rows(rows)
    return JSONResponse({"dataset": found.reference, "features": features})
