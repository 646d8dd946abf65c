"""An artifact that comes in a form, as `curl -F file=@NAME` sends it: the file in it is stored, not the envelope around it.

It waits in a file of this machine until the whole form is there: the field that names it may come after it, and a form that
breaks off has stored nothing.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass

from fastapi import Request
from starlette.datastructures import FormData
from starlette.datastructures import UploadFile as FormFile
from starlette.requests import ClientDisconnect

from api.artifacts.checksums import expected_checksums
from api.artifacts.run_artifacts import RunArtifacts, checked_path
from api.artifacts.verified_files import CHUNK_BYTES, UploadedFile
from api.routes.mlflow.artifacts import upload_interrupted
from resources.errors import HanzoError, invalid

USAGE = "send the file as the body, with its name as ?key=NAME (curl --data-binary @FILE), or as one file of a form"


@dataclass(frozen=True)
class FormArtifact:
    """The one file of a form, and what it is to be called in the run."""

    key: str
    file: FormFile


def is_form(request: Request) -> bool:
    return request.headers.get("content-type", "").lower().startswith("multipart/form-data")


async def receive_form(request: Request, artifacts: RunArtifacts, run_id: str, key: str | None) -> tuple[str, UploadedFile]:
    """The key under which the file of a form was stored, and what was. A checksum in a header is the file's.

    Raises:
        HanzoError: 400 where the form is none, or has no file or several, or nothing says what the file is called.
    """
    checksums = expected_checksums(request.headers)
    try:
        async with request.form(max_files=1) as form:
            sent = find_artifact(form, key)
            path = checked_path(sent.key)
            return sent.key, await artifacts.receive(run_id, path, file_chunks(sent.file), checksums, sent.file.size)
    except ClientDisconnect:
        raise upload_interrupted() from None


def find_artifact(form: FormData, key: str | None) -> FormArtifact:
    """What a form sends: under the key of the query, else that of its field `key`, else the file's own name."""
    file = next((value for value in form.values() if isinstance(value, FormFile)), None)
    if file is None:
        raise no_file()
    field = form.get("key")
    name = key or (field if isinstance(field, str) else "") or file.filename
    if not name:
        raise no_key()
    return FormArtifact(name, file)


async def file_chunks(file: FormFile) -> AsyncIterator[bytes]:
    while piece := await file.read(CHUNK_BYTES):
        yield piece


def no_file() -> HanzoError:
    return invalid(f"There is no file in this form: {USAGE} (curl -F file=@FILE)")


def no_key() -> HanzoError:
    return invalid(f"Nothing says what the artifact is called: {USAGE}")
