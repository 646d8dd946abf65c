"""Multipart upload forms of datasets and of run artifacts."""

import io
import json
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import IO, Any, BinaryIO, cast

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute
from starlette.datastructures import FormData
from starlette.datastructures import UploadFile as FormFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from api.artifacts.run_artifacts import RunArtifacts, checked_path
from api.artifacts.verified_files import CHUNK_BYTES, UploadedFile, expected_checksums
from api.json_bodies import parse_json
from api.routes.mlflow.artifacts import upload_interrupted
from resources.errors import HanzoError, invalid

# The form of an upload, read so that its files lie one behind the other in one file of this machine, however many they
# are.
#
# Starlette keeps up to a megabyte of each in memory, and opens a file for each larger one: for a dataset of many files
# that is more than the machine has, or than a process may open. So it takes no more than a thousand.
#
# A JSON object is a form without files: of a dataset that the server fetches, whose `source` it names, or of a query.

MAX_FILES = 50_000
"""Of one upload. What a form says of each takes a kilobyte of memory."""
BUFFER = 1 << 20
MAX_JSON = 1 << 20


class SpoolFile:
    """The file that all others lie in."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.end = 0

    def append(self, data: bytes) -> None:
        self.end += self._file.write(data)

    def read(self, start: int, size: int) -> bytes:
        self._file.seek(start)
        return self._file.read(size)


class FileSection(io.RawIOBase):
    """A file within another. It is written before the next one is, and read when all are there."""

    def __init__(self, whole: SpoolFile) -> None:
        self._whole = whole
        self._start = self._size = self._position = 0

    @property
    def _rolled(self) -> bool:
        """Starlette asks so whether a file has left memory, and then writes it in a thread: for a small one, which goes into
        a buffer, that took longer than all else.
        """
        return self._size > BUFFER

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        if not self._size:
            self._start = self._whole.end
        self._whole.append(data)
        self._size += len(data)
        return len(data)

    def readinto(self, buffer: Any) -> int:
        data = self._whole.read(self._start + self._position, max(0, min(len(buffer), self._size - self._position)))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        return self._position

    def tell(self) -> int:
        return self._position


class SingleFileParser(MultiPartParser):
    """Puts the files of a form into one."""

    def __init__(self, request: Request, whole: IO[bytes]) -> None:
        super().__init__(request.headers, request.stream(), max_files=MAX_FILES)
        self._whole = SpoolFile(whole)

    def on_headers_finished(self) -> None:
        super().on_headers_finished()
        if (upload := self._current_part.file) is not None:
            self._files_to_close_on_error.pop().close()
            upload.file = cast(BinaryIO, FileSection(self._whole))


class UploadRequest(Request):
    def __init__(self, request: Request, whole: IO[bytes]) -> None:
        super().__init__(request.scope, request.receive)
        self._whole = whole

    async def _get_form(self, **limits: Any) -> FormData:
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if self._form is None and kind == "application/json":
            self._form = FormData(list(form_fields(await self._json_text())))
        if self._form is None and kind == "multipart/form-data":
            try:
                self._form = await SingleFileParser(self, self._whole).parse()
            except MultiPartException as problem:
                raise HTTPException(400, problem.message) from None
        return await super()._get_form(**limits)

    async def _json_text(self) -> bytes:
        text = bytearray()
        async for part in self.stream():
            text += part
            if len(text) > MAX_JSON:
                raise HTTPException(
                    400, "a JSON body names a dataset's source: send its files in a form (multipart/form-data)"
                )
        return bytes(text)


def form_fields(text: bytes) -> Iterator[tuple[str, str]]:
    """A JSON object as the fields of a form, which are texts.

    Raises:
        HTTPException: it is none. Of other errors FastAPI would not tell what they say.
    """
    try:
        found = parse_json(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise HTTPException(400, "send a form (multipart/form-data), or a JSON object with `name` and `source`, or `sql`")
    for name, value in found.items():
        for each in value if isinstance(value, list) else [value]:
            if each is not None:
                yield name, each if isinstance(each, str) else json.dumps(each)


class UploadRoute(APIRoute):
    """A route whose form is read so. What was uploaded is gone when the answer is there."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_upload(request: Request) -> Response:
            with tempfile.TemporaryFile(buffering=BUFFER) as whole:
                return await handle(UploadRequest(request, whole))

        return handle_upload


# An artifact that comes in a form, as `curl -F file=@NAME` sends it: the file in it is stored, not the envelope around
# it.
#
# It waits in a file of this machine until the whole form is there: the field that names it may come after it, and a form
# that breaks off has stored nothing.

ARTIFACT_USAGE = "send the file as the body, with its name as ?key=NAME (curl --data-binary @FILE), or as one file of a form"


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
    return invalid(f"There is no file in this form: {ARTIFACT_USAGE} (curl -F file=@FILE)")


def no_key() -> HanzoError:
    return invalid(f"Nothing says what the artifact is called: {ARTIFACT_USAGE}")
