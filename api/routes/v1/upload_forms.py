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

# Parse upload forms so that all files are stored in sequence in one temporary file, however many they are.
#
# Starlette keeps up to a megabyte of each file in memory, and opens a temporary file for each larger one: datasets of many
# files exceed the memory, or the open files of a process. Its default limit is a thousand files.
#
# A JSON object is a form without files: for a dataset that the server fetches from `source`, or for a query.

MAX_FILES = 50_000
"""Of one upload. The form's data about each takes a kilobyte of memory."""
BUFFER = 1 << 20
MAX_JSON = 1 << 20


class SpoolFile:
    """The temporary file that contains all others."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.end = 0

    def append(self, data: bytes) -> None:
        self.end += self._file.write(data)

    def read(self, start: int, size: int) -> bytes:
        self._file.seek(start)
        return self._file.read(size)


class FileSection(io.RawIOBase):
    """A file within another: written before the next one begins, read once all are complete."""

    def __init__(self, whole: SpoolFile) -> None:
        self._whole = whole
        self._start = self._size = self._position = 0

    @property
    def _rolled(self) -> bool:
        """Report to Starlette whether the file has left memory.

        It then writes in a thread, which for a small, buffered file took longer than everything else.
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
    """Stores the files of a form in one file."""

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
    """Yield the members of a JSON object as text fields of a form.

    Raises:
        HTTPException: it is not a JSON object. FastAPI would hide the message of other errors.
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
    """A route that spools the files of its form, and deletes them after the response."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_upload(request: Request) -> Response:
            with tempfile.TemporaryFile(buffering=BUFFER) as whole:
                return await handle(UploadRequest(request, whole))

        return handle_upload


# An artifact sent in a form, as `curl -F file=@NAME` does: the file is stored, not the multipart body.
#
# It is spooled until the form is complete: the field with its name may come after it, and an interrupted form must store
# nothing.

ARTIFACT_USAGE = "send the file as the body, with its name as ?key=NAME (curl --data-binary @FILE), or as one file of a form"


@dataclass(frozen=True)
class FormArtifact:
    """The only file of a form, and its name in the run."""

    key: str
    file: FormFile


def is_form(request: Request) -> bool:
    return request.headers.get("content-type", "").lower().startswith("multipart/form-data")


async def receive_form(request: Request, artifacts: RunArtifacts, run_id: str, key: str | None) -> tuple[str, UploadedFile]:
    """Store the file of a form; return its key and the stored file.

    Checksums in headers are those of the file.

    Raises:
        HanzoError: 400 for an invalid form, no file or several, or a file without a name.
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
    """Return the form's file, named by the query, the field `key`, or its own name."""
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
    return invalid(f"The artifact has no name: {ARTIFACT_USAGE}")
