"""Looking at versions: list, one, its first records, what changed, and where it stands in the lineage."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from fastapi.responses import JSONResponse
from pydantic import Field, JsonValue

from api.artifacts.file_response import SAFE
from api.dependencies import CallerOf, DatabaseOf, StoreOf
from api.idempotency import JobOfKey
from api.schemas.v1.datasets import find, find_own, reading, version_json, versions_json
from api.strict_json import Body, StrictRoute
from recipes.parameters import PrepareParameters
from recipes.preparation.tokenizer_reference import recipe_named
from recipes.record_lines import record_lines
from recipes.schema import BadConfiguration
from resources.dataset_deletion import delete_version
from resources.derived_versions import refuse_unknown_columns, refuse_what_decides_nothing
from resources.errors import invalid
from resources.lineage.datasets import lineage
from resources.metadata.dataset_rules import checked_name
from resources.metadata.datasets import MAX_PAGE, Datasets
from resources.metadata.jobs import PREPARATION, Jobs

PREVIEW_BYTES = 16 << 20
router = APIRouter(prefix="/v1/datasets", tags=["v1"])
edits = APIRouter(prefix="/v1/datasets", tags=["v1"], route_class=StrictRoute)


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


class Description(Body):
    """Each replaces what there was; what is not given stays."""

    tags: list[str] | None = None
    metadata: dict[str, JsonValue] | None = None


@edits.patch("/{dataset_id}")
def describe(dataset_id: str, body: Description, database: DatabaseOf) -> Response:
    """Edit tags and metadata. All else of a version is what it was: make a new version."""
    if body.tags is None and body.metadata is None:
        raise invalid("nothing to change: give `tags`, `metadata` or both; all else of a version never changes")
    return JSONResponse(version_json(database, Datasets(database).describe(dataset_id, body.tags, body.metadata)))


@edits.delete("/{dataset_id}")
def remove(dataset_id: str, database: DatabaseOf, store: StoreOf, caller: CallerOf) -> Response:
    """Delete a version that no run, job or other version refers to; its number is not given again."""
    return JSONResponse({"deleted": delete_version(database, store, dataset_id, caller.user_id).reference})


class Preparation(PrepareParameters):
    """The specification's sections, the name of the dataset that the version belongs to, and how much works on it."""

    name: str | None = Field(None, description="of the prepared dataset; that of its parent where none is given")
    workers: int = Field(1, ge=1, le=256, description="processes, of each pod")
    pods: int = Field(1, ge=1, le=256, description="on a cluster; on one machine it is one")


@edits.post("/{dataset_id}/prepare", status_code=201)
def prepare(dataset_id: str, body: Preparation, database: DatabaseOf, caller: CallerOf, job_of_key: JobOfKey) -> Response:
    """Queue the preparation of a version; the answer is its job, as of `GET /v1/jobs/{id}`. Sent again with the same
    Idempotency-Key it answers with the job that was queued, whatever the body says.
    """
    if known := Jobs(database).known(job_of_key):
        return JSONResponse(vars(known), 201)
    parent = find(database, dataset_id)
    name = checked_name(body.name or parent.name)
    refuse_what_decides_nothing(body)
    refuse_unknown_columns(body, parent)
    refuse_unknown_recipe(body)
    config = {
        "name": name,
        "dataset": parent.reference,
        "parameters": body.model_dump(mode="json", exclude={"name", "workers", "pods"}),
        "workers": body.workers,
        "pods": body.pods,
    }
    job = Jobs(database).submit(
        name=f"prepare {parent.reference}",
        config=config,
        user=caller.user_id,
        organization=caller.organization,
        type=PREPARATION,
        id=job_of_key,
    )
    return JSONResponse(vars(job), 201)


def refuse_unknown_recipe(body: PrepareParameters) -> None:
    """Raises 400 for a tokenizer of a recipe that there is not. Of others only who fetches them knows whether they are."""
    try:
        if body.tokenize is not None:
            recipe_named(body.tokenize.tokenizer)
    except BadConfiguration as problem:
        raise invalid(f"tokenize.tokenizer: {problem}") from None
