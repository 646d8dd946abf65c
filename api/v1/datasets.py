"""/v1/datasets (rows B3-B5, B7, S5)."""

import tempfile
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from fastapi import APIRouter, File, Form, Query, Response, UploadFile
from fastapi.responses import JSONResponse

from api.dependencies import CallerOf, DatabaseOf, StoreOf
from resources.errors import invalid
from resources.ingest.create import create_version
from resources.metadata.datasets import Datasets, DatasetVersion

router = APIRouter(prefix="/v1/datasets", tags=["v1"])

CHUNK = 1 << 20


@router.post("")
def create(
    name: Annotated[str, Form()],
    files: Annotated[list[UploadFile], File()],
    database: DatabaseOf,
    store: StoreOf,
    caller: CallerOf,
    format: Annotated[str, Form()] = "jsonl",
    tags: Annotated[list[str] | None, Form()] = None,
) -> Response:
    """Upload files as a new version. 201 with the version; 200 when this content is a version already."""
    with tempfile.TemporaryDirectory() as scratch:
        path = folder = Path(scratch) / "upload"
        for file in files:
            target = folder / safe_name(file.filename or "")
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as out:
                while chunk := file.file.read(CHUNK):
                    out.write(chunk)
        if len(files) == 1 and target.parent == folder:
            path = target  # as with `--path FILE`: taken whatever it is called
        version, is_new = create_version(
            database,
            store,
            name=name,
            path=path,
            format=format,
            user=caller.user_id,
            organization=caller.organization,
            tags=tags or (),
        )
    return JSONResponse({**as_json(version), "created": is_new}, 201 if is_new else 200)


def safe_name(name: str) -> PurePosixPath:
    """An uploaded file's relative path. Raises on anything that could lie elsewhere."""
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\\" in name or not name.isprintable():
        raise invalid(f"file name {name[:100]!r} is not allowed: send relative names without '..'")
    return path


@router.get("")
def list_versions(
    database: DatabaseOf,
    caller: CallerOf,
    name: str | None = None,
    tags: Annotated[list[str] | None, Query()] = None,
) -> Response:
    found = Datasets(database).list(caller.organization, name, tags or ())
    return JSONResponse({"datasets": [as_json(version) for version in found]})


@router.get("/{dataset_id}")
def get(dataset_id: str, database: DatabaseOf) -> Response:
    return JSONResponse(as_json(find(database, dataset_id)))


@router.get("/{dataset_id}/preview")
def preview(dataset_id: str, database: DatabaseOf, store: StoreOf, n: Annotated[int, Query(ge=1, le=1000)] = 10) -> Response:
    """The first N records, one JSON line each."""
    version = find(database, dataset_id)
    lines = store.get_bytes(f"{version.artifact.uri}/records.jsonl").splitlines(keepends=True)[:n]
    return Response(b"".join(lines), media_type="application/jsonl")


def find(database: DatabaseOf, dataset_id: str) -> DatasetVersion:
    with database.read() as connection:
        return Datasets(database).get(dataset_id, connection)


def as_json(version: DatasetVersion) -> dict[str, Any]:
    return vars(version) | {"artifact": version.artifact.model_dump()}
