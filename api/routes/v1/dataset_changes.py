"""What can be changed of a version: its tags and its metadata, and whether it is there."""

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from pydantic import JsonValue

from api.dependencies import CallerOf, DatabaseOf, StoreOf
from api.schemas.v1.datasets import version_json
from api.strict_json import Body, StrictRoute
from resources.dataset_deletion import delete_version
from resources.errors import invalid
from resources.metadata.datasets import Datasets

router = APIRouter(prefix="/v1/datasets", tags=["v1"], route_class=StrictRoute)


class Description(Body):
    """Each replaces what there was; what is not given stays."""

    tags: list[str] | None = None
    metadata: dict[str, JsonValue] | None = None


@router.patch("/{dataset_id}")
def describe(dataset_id: str, body: Description, database: DatabaseOf) -> Response:
    """Edit tags and metadata. All else of a version is what it was: make a new version."""
    if body.tags is None and body.metadata is None:
        raise invalid("nothing to change: give `tags`, `metadata` or both; all else of a version never changes")
    return JSONResponse(version_json(database, Datasets(database).describe(dataset_id, body.tags, body.metadata)))


@router.delete("/{dataset_id}")
def remove(dataset_id: str, database: DatabaseOf, store: StoreOf, caller: CallerOf) -> Response:
    """Delete a version that no run, job or other version refers to; its number is not given again."""
    return JSONResponse({"deleted": delete_version(database, store, dataset_id, caller.user_id).reference})
