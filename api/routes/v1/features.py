"""/v1/features: features of a dataset version, by key or computed from raw rows."""

from typing import Annotated, Any

from fastapi import Body, Query, Request
from typing_extensions import TypedDict

from api.auth.permissions import Permission
from api.dependencies import CallerDep, DatabaseDep, StoreDep
from api.json_bodies import TypedResponse, json_response
from api.routing import Audit, Router
from api.schemas.v1.datasets import reporting_data_loss
from resources.datasets.feature_store import find_features, find_version_with_features, open_feature_table

Features = dict[str, float | None]


class FeaturesOfKey(TypedDict):
    dataset: str
    key: str
    features: Features


class FeaturesOfRows(TypedDict):
    """In the order of the rows."""

    dataset: str
    features: list[Features]


router = Router("/v1/features", tag="v1")

MAX_ROWS = 1000
Version = Annotated[int | None, Query(ge=1, le=999_999_999, description="by default the newest version with features")]


@router.get("/{name}/{key:path}", Permission.DATASETS_READ, audit=Audit.NOTED)
def get(
    request: Request, name: str, key: str, database: DatabaseDep, store: StoreDep, caller: CallerDep, version: Version = None
) -> TypedResponse[FeaturesOfKey]:
    """Return the features of a key, from its last record in the version."""
    found = find_version_with_features(database, name, caller.organization, version)
    request.state.dataset_id = found.id  # for the audit log
    with reporting_data_loss(f"dataset {found.reference}"):
        features = find_features(store, found, key)
    return json_response({"dataset": found.reference, "key": key, "features": features})


@router.post("/{name}/transform", Permission.DATASETS_READ, read_only=True, audit=Audit.NOTED)
def transform(
    request: Request,
    name: str,
    rows: Annotated[list[dict[str, Any]], Body(max_length=MAX_ROWS)],
    database: DatabaseDep,
    store: StoreDep,
    caller: CallerDep,
    version: Version = None,
) -> TypedResponse[FeaturesOfRows]:
    """Compute features of raw rows, in order, equal to those that a preparation writes."""
    found = find_version_with_features(database, name, caller.organization, version)
    request.state.dataset_id = found.id  # for the audit log
    with reporting_data_loss(f"dataset {found.reference}"):
        features = open_feature_table(store, found).transform_rows(rows)
    return json_response({"dataset": found.reference, "features": features})
