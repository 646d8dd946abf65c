"""/v1/datasets: list, read, preview, compare, edit, delete and prepare dataset versions."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Annotated, Any, NotRequired, cast

from fastapi import Query, Response
from pydantic import Field, JsonValue
from typing_extensions import TypedDict

from api.artifacts.file_response import SAFE_HEADERS
from api.auth.permissions import Permission
from api.dependencies import CallerDep, DatabaseDep, StoreDep
from api.idempotency import JobIdFromKey
from api.json_bodies import Body, Deleted, TypedResponse, json_response
from api.routing import Audit, Router
from api.schemas.v1.datasets import (
    DatasetVersion,
    DatasetVersions,
    find_own_version,
    find_version,
    reporting_data_loss,
    version_json,
    versions_json,
)
from api.schemas.v1.jobs import Job
from recipes.contracts.job import BadConfiguration
from recipes.contracts.parameters import PrepareParameters
from recipes.contracts.tokenizer_reference import find_recipe
from recipes.records.record_reader import iterate_record_lines
from resources.datasets.deletion import delete_version
from resources.datasets.prepared_versions import refuse_ineffective_settings, refuse_unknown_columns
from resources.errors import invalid
from resources.lineage.dataset_lineage import LinkedArtifact, read_lineage
from resources.metadata.datasets import MAX_PAGE, Datasets
from resources.metadata.field_rules import checked_dataset_name
from resources.metadata.jobs import PREPARATION, Jobs


class DiffedVersion(TypedDict):
    """`columns` maps a column to the number of records by type."""

    reference: str
    num_records: int
    size_bytes: int
    columns: dict[str, dict[str, int]]


class DiffExamples(TypedDict):
    """The first few records of each kind; `changed` if a key was given."""

    added: list[Any]
    removed: list[Any]
    changed: NotRequired[list[Any]]


class DatasetDiff(TypedDict):
    """Changes from `old` to `new`; `changed` is null without a key.

    Schemas map a column to type names.
    """

    old: DiffedVersion
    new: DiffedVersion
    added: int
    removed: int
    changed: int | None
    unchanged: int
    schema_added: dict[str, str]
    schema_removed: dict[str, str]
    schema_changed: dict[str, tuple[str, str]]
    examples: DiffExamples


class DatasetLineage(TypedDict):
    """`made_from` begins with the nearest; `children` are versions, `made_into` all other descendants."""

    dataset: str
    parents: list[str]
    transform: Any
    origins: list[str]
    made_from: list[LinkedArtifact]
    children: list[str]
    made_into: list[LinkedArtifact]


PREVIEW_BYTES = 16 << 20
router = Router("/v1/datasets", tag="v1", strict=False)
edits = Router("/v1/datasets", tag="v1")


@router.get("", Permission.DATASETS_READ)
def list_versions(
    database: DatabaseDep,
    caller: CallerDep,
    name: str | None = None,
    org: Annotated[str | None, Query(description="the caller's own; the list is empty for any other")] = None,
    tags: Annotated[list[str] | None, Query(description="all of them")] = None,
    max_results: Annotated[int, Query(ge=1, le=MAX_PAGE)] = MAX_PAGE,
    page_token: str | None = None,
) -> TypedResponse[DatasetVersions]:
    """List the versions of the caller's organization, by name and number."""
    if org not in (None, caller.organization):
        return json_response({"datasets": []})
    found, token = Datasets(database).page(
        caller.organization, name=name, tags=tags or (), limit=max_results, page_token=page_token
    )
    page: DatasetVersions = {"datasets": versions_json(database, found)}
    if token:
        page["next_page_token"] = token
    return json_response(page)


@router.get("/{dataset_id}", Permission.DATASETS_READ, allows_jobs=True)
def get(dataset_id: str, database: DatabaseDep) -> TypedResponse[DatasetVersion]:
    return json_response(version_json(database, find_version(database, dataset_id)))


@router.get(
    "/{dataset_id}/preview", Permission.DATASETS_READ, audit=Audit.EACH, allows_jobs=True, produces="application/jsonl"
)
def preview(
    dataset_id: str, database: DatabaseDep, store: StoreDep, n: Annotated[int, Query(ge=1, le=1000)] = 10
) -> Response:
    """Return the first N records as JSON lines, limited to about 16 MiB."""
    version = find_version(database, dataset_id)
    with reporting_data_loss(f"dataset {version.reference}"):
        lines = b"".join(preview_lines(iterate_record_lines(store, version.artifact), n))
    return Response(lines, media_type="application/jsonl", headers=SAFE_HEADERS)


def preview_lines(lines: Iterable[bytes], count: int) -> Iterator[bytes]:
    """Yield lines until a preview's size limit: one record may have 64 MiB."""
    size = 0
    for line in islice(lines, count):
        yield line
        size += len(line)
        if size >= PREVIEW_BYTES:
            return


@router.get("/{dataset_id}/diff", Permission.DATASETS_READ, audit=Audit.EACH)
def compare(
    dataset_id: str,
    against: Annotated[str, Query(description="id of the earlier version, or NAME@VERSION")],
    database: DatabaseDep,
    store: StoreDep,
    caller: CallerDep,
    key: Annotated[str | None, Query(description="column that identifies a record in both versions")] = None,
) -> TypedResponse[DatasetDiff]:
    """Compare this version with the earlier `against`."""
    # Imported late: numpy would slow the server's start.
    from resources.datasets.diff import diff_versions

    old, new = find_own_version(database, against, caller), find_version(database, dataset_id)
    with reporting_data_loss(f"dataset {old.reference} or {new.reference}"):
        found = diff_versions(store, old, new, key)
    return json_response(cast(DatasetDiff, vars(found)))


@router.get("/{dataset_id}/lineage", Permission.DATASETS_READ, audit=Audit.EACH)
def ancestry(dataset_id: str, database: DatabaseDep) -> TypedResponse[DatasetLineage]:
    """Return ancestors and descendants of a version: versions, splits, runs, models."""
    with database.read() as connection:
        version = Datasets(database).get(dataset_id, connection)
        found = read_lineage(connection, version)
    return json_response(cast(DatasetLineage, {"dataset": version.reference, **vars(found)}))


class Description(Body):
    """A given field replaces the old value; others are unchanged."""

    tags: list[str] | None = None
    metadata: dict[str, JsonValue] | None = None


@edits.patch("/{dataset_id}", Permission.DATASETS_WRITE)
def describe(dataset_id: str, body: Description, database: DatabaseDep) -> TypedResponse[DatasetVersion]:
    """Edit tags and metadata; everything else about a version is immutable."""
    if body.tags is None and body.metadata is None:
        raise invalid("nothing to change: give `tags`, `metadata` or both; everything else is immutable")
    return json_response(version_json(database, Datasets(database).describe(dataset_id, body.tags, body.metadata)))


@edits.delete("/{dataset_id}", Permission.DATASETS_DELETE)
def remove(dataset_id: str, database: DatabaseDep, store: StoreDep, caller: CallerDep) -> TypedResponse[Deleted]:
    """Delete an unused version; its number is not reused.

    No run, job or other version may refer to it.
    """
    return json_response({"deleted": delete_version(database, store, dataset_id, caller.user_id).reference})


class Preparation(PrepareParameters):
    """The specification's sections, the prepared dataset's name, and the number of processes."""

    name: str | None = Field(None, description="of the prepared dataset; by default that of its parent")
    workers: int = Field(1, ge=1, le=256, description="processes of each pod")
    pods: int = Field(1, ge=1, le=256, description="on a cluster; always one on a single machine")


@edits.post("/{dataset_id}/prepare", Permission.DATASETS_WRITE, status_code=201)
def prepare(
    dataset_id: str, body: Preparation, database: DatabaseDep, caller: CallerDep, new_job_id: JobIdFromKey
) -> TypedResponse[Job]:
    """Queue the preparation of a version; return its job, as of `GET /v1/jobs/{id}`.

    A repeated Idempotency-Key returns the existing job, and ignores the body.
    """
    if known := Jobs(database).find_by_id(new_job_id):
        return json_response(cast(Job, vars(known)), 201)
    parent = find_version(database, dataset_id)
    name = checked_dataset_name(body.name or parent.name)
    refuse_ineffective_settings(body)
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
        id=new_job_id,
    )
    return json_response(cast(Job, vars(job)), 201)


def refuse_unknown_recipe(body: PrepareParameters) -> None:
    """Raise a 400 for a tokenizer of an unknown recipe; others are checked when fetched."""
    try:
        if body.tokenize is not None:
            find_recipe(body.tokenize.tokenizer)
    except BadConfiguration as problem:
        raise invalid(f"tokenize.tokenizer: {problem}") from None
