"""Looking at versions: list, one, its first records, what changed, and where it stands in the lineage."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from fastapi.responses import JSONResponse

from api.artifacts.file_response import SAFE
from api.dependencies import CallerOf, DatabaseOf, StoreOf
from api.schemas.v1.datasets import find, find_own, reading, version_json, versions_json
from recipes.record_lines import record_lines
from resources.lineage.datasets import lineage
from resources.metadata.datasets import MAX_PAGE, Datasets

PREVIEW_BYTES = 16 << 20
router = APIRouter(prefix="/v1/datasets", tags=["v1"])


@router.get("")
def list_versions(
    database: DatabaseOf,
    caller: CallerOf,
    name: str | None = None,
    org: Annotated[str | None, Query(description="nobody sees another than their own: of others the list is empty")] = None,
    tags: Annotated[list[str] | None, Query(description="all of them")] = None,
    max_results: Annotated[int, Query(ge=1, le=MAX_PAGE)] = MAX_PAGE,
    page_token: str | None = None,
) -> Response:
    """The caller's organization's versions by name and number."""
    if org not in (None, caller.organization):
        return JSONResponse({"datasets": []})
    found, token = Datasets(database).page(
        caller.organization, name=name, tags=tags or (), limit=max_results, page_token=page_token
    )
    following = {"next_page_token": token} if token else {}
    return JSONResponse({"datasets": versions_json(database, found), **following})


@router.get("/{dataset_id}")
def get(dataset_id: str, database: DatabaseOf) -> Response:
    return JSONResponse(version_json(database, find(database, dataset_id)))


@router.get("/{dataset_id}/preview")
def preview(dataset_id: str, database: DatabaseOf, store: StoreOf, n: Annotated[int, Query(ge=1, le=1000)] = 10) -> Response:
    """The first N records, one JSON line each; fewer where they are long: the one that reaches 16 MiB is the last."""
    version = find(database, dataset_id)
    with reading(f"dataset {version.reference}"):
        lines = b"".join(looked_at(record_lines(store, version.artifact), n))
    return Response(lines, media_type="application/jsonl", headers=SAFE)


def looked_at(lines: Iterable[bytes], count: int) -> Iterator[bytes]:
    """The first lines, so many and so long as a preview has: a record may have 64 MiB, and a thousand more than memory."""
    size = 0
    for line in islice(lines, count):
        yield line
        size += len(line)
        if size >= PREVIEW_BYTES:
            return


@router.get("/{dataset_id}/diff")
def compare(
    dataset_id: str,
    against: Annotated[str, Query(description="id of the earlier version, or NAME@VERSION")],
    database: DatabaseOf,
    store: StoreOf,
    caller: CallerOf,
    key: Annotated[str | None, Query(description="column that tells which record of one is which of the other")] = None,
) -> Response:
    """What changed from `against` to this version."""
    # numpy is a part of a server's start that it need not wait for.
    from resources.dataset_diff import diff

    old, new = find_own(database, against, caller), find(database, dataset_id)
    with reading(f"dataset {old.reference} or {new.reference}"):
        found = diff(store, old, new, key)
    plain: dict[str, Any] = vars(found) | {"old": vars(found.old), "new": vars(found.new)}
    return JSONResponse(plain)


@router.get("/{dataset_id}/lineage")
def ancestry(dataset_id: str, database: DatabaseOf) -> Response:
    """What the version was made of, and all that was made of it: versions, splits, runs, models."""
    with database.read() as connection:
        version = Datasets(database).get(dataset_id, connection)
        found = lineage(connection, version)
    plain = vars(found) | {way: [vars(each) for each in getattr(found, way)] for way in ("made_from", "made_into")}
    return JSONResponse({"dataset": version.reference, **plain})
