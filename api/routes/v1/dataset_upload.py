"""POST /v1/datasets: create a version from uploaded files, a source address or a query.

Files are uploaded in a form, or a single one as the body.
"""

import json
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import PurePosixPath
from typing import Annotated, BinaryIO, cast

from fastapi import File, Form, Query, Request, UploadFile
from pydantic import JsonValue
from starlette.concurrency import run_in_threadpool

from api.artifacts.run_artifacts import check_storable
from api.auth.permissions import Caller, Permission
from api.dependencies import CallerDep, DatabaseDep, SettingsDep, StoreDep
from api.json_bodies import TypedResponse, json_response
from api.routes.v1.upload_forms import UploadRoute
from api.routing import AlsoAnswers, Router
from api.schemas.v1.datasets import KnownDatasetVersion, NewDatasetVersion, version_json
from recipes.storage import uris
from recipes.storage.artifact_store import Store
from resources.errors import invalid
from resources.ingest.formats import parse_format
from resources.ingest.new_version import NewVersion, find_unapplied_fields
from resources.ingest.remote_sources import allowed_files, allowed_query_source
from resources.ingest.source_files import SourceFile
from resources.metadata.database import Database

router = Router("/v1/datasets", tag="v1", route_class=UploadRoute)

NEW_VERSION = AlsoAnswers(201, "a new version; 200 is the newest version, which has the same content", NewDatasetVersion)


@router.post("", Permission.DATASETS_WRITE, streams_body=True, also=NEW_VERSION)
def create(
    name: Annotated[str, Form()],
    database: DatabaseDep,
    store: StoreDep,
    settings: SettingsDep,
    caller: CallerDep,
    files: Annotated[list[UploadFile] | None, File()] = None,
    source: Annotated[
        str | None, Form(description="s3://, file:// or kafka:// address, below one that the server allows")
    ] = None,
    sql: Annotated[str | None, Form(description="a query whose rows are the records; with `database`")] = None,
    asked: Annotated[
        str | None, Form(alias="database", description="name of a database that the server may query, from its settings")
    ] = None,
    format: Annotated[str, Form()] = "jsonl",
    tags: Annotated[list[str] | None, Form()] = None,
    metadata: Annotated[str, Form(description="a JSON object")] = "{}",
) -> TypedResponse[KnownDatasetVersion] | TypedResponse[NewDatasetVersion]:
    """Create a version from uploaded files, files that the server fetches, or a query's rows.

    201 with the new version; 200 if the newest version has the same content, with the tags, metadata and format that were
    given but are not those of that version as `not_taken` (PATCH sets tags and metadata).
    """
    if (source is not None) + bool(files) + (sql is not None) != 1 or (sql is None) != (asked is None):
        raise invalid(
            "send the dataset's files in a form (multipart/form-data), the address of its `source`, or a query as `sql` "
            "with the name of its `database`: exactly one of these"
        )
    wanted = new_version(name, format, caller, tags, metadata)
    if source is not None:
        found = allowed_files(settings, source, parse_format(format))
    elif sql is not None and asked is not None:
        found = [allowed_query_source(settings, asked, sql, parse_format(format), caller.organization)]
    else:
        found = [SourceFile(str(safe_name(file.filename or "")), reopened(file.file)) for file in files or ()]
    return create_version(database, store, wanted, found)


@router.post("/raw", Permission.DATASETS_WRITE, streams_body=True, also=NEW_VERSION)
async def create_from_body(
    request: Request,
    name: str,
    file: Annotated[str, Query(description="file name of the body, such as data.jsonl")],
    database: DatabaseDep,
    store: StoreDep,
    caller: CallerDep,
    format: str = "jsonl",
    tags: Annotated[list[str] | None, Query()] = None,
    metadata: Annotated[str, Query(description="a JSON object")] = "{}",
) -> TypedResponse[KnownDatasetVersion] | TypedResponse[NewDatasetVersion]:
    """Create a version from the body as its only file, of unknown length."""
    wanted = new_version(name, format, caller, tags, metadata)
    path = str(safe_name(file))
    with tempfile.TemporaryFile() as spooled:
        await spool_body(request.stream(), spooled)
        return await run_in_threadpool(create_version, database, store, wanted, [SourceFile(path, reopened(spooled))])


def new_version(name: str, format: str, caller: Caller, tags: Sequence[str] | None, metadata: str) -> NewVersion:
    return NewVersion(name, format, caller.user_id, caller.organization, tuple(tags or ()), read_metadata(metadata))


def create_version(
    database: Database, store: Store, wanted: NewVersion, files: Sequence[SourceFile]
) -> TypedResponse[KnownDatasetVersion] | TypedResponse[NewDatasetVersion]:
    # Imported late: numpy would slow the server's start.
    from resources.ingest.version_creation import ingest_files

    found = ingest_files(database, store, wanted, files)
    made = cast(NewDatasetVersion, {**version_json(database, found.version), "created": found.is_new})
    if found.skipped:
        made["skipped"] = list(found.skipped)
    if found.unread:
        made["unread"] = dict(found.unread)
    if found.is_new:
        return json_response(made, 201)
    return json_response(cast(KnownDatasetVersion, {**made, "not_taken": find_unapplied_fields(wanted, found.version)}))


async def spool_body(body: AsyncIterator[bytes], spooled: BinaryIO) -> None:
    async for chunk in body:
        await run_in_threadpool(spooled.write, chunk)


def reopened(file: BinaryIO) -> Callable[[], AbstractContextManager[BinaryIO]]:
    """Return an opener that rewinds an open file, and leaves it open."""

    @contextmanager
    def open_again() -> Iterator[BinaryIO]:
        file.seek(0)
        yield file

    return open_again


def read_metadata(text: str) -> dict[str, JsonValue]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise invalid("metadata must be a JSON object")
    return found


def safe_name(name: str) -> PurePosixPath:
    """Return the relative path of an uploaded file; refuse paths outside the folder."""
    path = PurePosixPath(name)
    if not path.name or path.is_absolute() or ".." in path.parts or "\\" in name or not name.isprintable():
        raise invalid(
            f"file name {name[:100]!r} is not allowed: rename it, without '..', backslashes and control characters"
        )
    check_storable(str(path), f"{uris.DATASETS}/{path}")
    return path
