"""What `hanzo-ml dataset create` sends: local files in a form, rows of a query as a body, an address or a query for the
server.
"""

import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import httpx
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from hanzo_ml.cli.connection import Refused, call
from recipes.contracts.dataset_formats import COMPRESSIONS, ENDINGS, Format
from recipes.records.sql_query import BadQuery, query_lines

ADDRESSES = ("s3://", "file://", "kafka://")
"""How those begin that the server fetches."""
NEVER = httpx.Timeout(30.0, read=None, write=600.0)
"""How long the server may take to check what it got: as long as that takes."""
ROUTE = "/v1/datasets"
Told = Callable[[int], None]


class Watched(io.RawIOBase):
    """A file that tells how much of it was read, and is open only while it is: a process may not have thousands open."""

    def __init__(self, path: Path, told: Told) -> None:
        self._path = path
        self._told = told
        self._size = path.stat().st_size
        self._place = 0
        self._file: BinaryIO | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._file is None:
            self._file = self._path.open("rb")
            self._file.seek(self._place)
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        self._place += len(data)
        self._told(len(data))
        if not data:
            self._leave()
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """What is sent before a file is its length, which whoever sends it finds so."""
        self._leave()
        self._place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size}[whence]
        return self._place

    def tell(self) -> int:
        return self._place

    def close(self) -> None:
        self._leave()
        super().close()

    def _leave(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def send_files(name: str, fields: dict[str, Any]) -> Any:
    """Upload a file, or all of the format in a folder."""
    if "://" in name:
        raise Refused(f"nothing is fetched from {name}: give a file of this machine, s3://..., file://... or kafka://...")
    path = Path(name)
    files = local_files(path, str(fields["format"]))
    total = sum(file.stat().st_size for file in files)
    is_folder = path.is_dir()
    with progress_line("uploading", total) as told:
        names = [file.relative_to(path).as_posix() if is_folder else file.name for file in files]
        parts = [("files", (name, Watched(file, told))) for name, file in zip(names, files, strict=True)]
        return call("POST", ROUTE, data=fields, files=parts, timeout=NEVER)


def send_query(database: str, statement: str, fields: dict[str, Any]) -> Any:
    """Upload the rows of a query as JSON lines."""
    with progress_line("reading the query's rows", None) as told:

        def body() -> Iterator[bytes]:
            for block in query_lines(database, statement):
                told(len(block))
                yield block

        try:
            return call("POST", f"{ROUTE}/raw", params={**fields, "file": "query.jsonl"}, content=body(), timeout=NEVER)
        except BadQuery as problem:
            raise Refused(str(problem)) from None


def ask_for_query(database: str, statement: str, fields: dict[str, Any]) -> Any:
    """Have the server ask a database that its settings name."""
    return call("POST", ROUTE, data={**fields, "sql": statement, "database": database}, timeout=NEVER)


def send_address(address: str, fields: dict[str, Any]) -> Any:
    """Have the server fetch the files."""
    return call("POST", ROUTE, data={**fields, "source": address}, timeout=NEVER)


def format_of(path: str) -> str:
    """The format that the files' endings say, for whoever gives none: JSON lines where they say nothing.

    Text is taken where it is asked for: anything can be read as that, JSON lines in a `.txt` too.
    """
    if path.startswith("kafka://"):  # the name of a topic may end as anything
        return "jsonl"
    folder = Path(path)
    names = (file.name for file in folder.rglob("*")) if folder.is_dir() else (path,)
    found = sorted({format for name in names for format in ENDINGS if format != Format.TEXT and has_format(name, format)})
    if len(found) > 1:
        raise Refused(f"folder {path} holds files of the formats {', '.join(found)}: say which with --format")
    return found[0] if found else "jsonl"


def has_format(name: str, format: str) -> bool:
    endings = tuple(ending + packed for ending in ENDINGS.get(format, (f".{format}",)) for packed in ("", *COMPRESSIONS))
    return name.lower().endswith(endings)


def local_files(path: Path, format: str) -> Sequence[Path]:
    if not path.exists():
        raise Refused(f"there is no file or folder {path}: check --path")
    is_folder = path.is_dir()
    files = sorted(file for file in path.rglob("*") if has_format(file.name, format)) if is_folder else [path]
    files = [file for file in files if not file.is_dir()]
    if not files:
        ending = ENDINGS.get(format, (f".{format}",))[0]
        raise Refused(f"folder {path} holds no *{ending} file: check --path and --format")
    if unread := [file for file in files if not file.is_file()]:
        raise Refused(f"{unread[0]} is a link to nothing, or no regular file: correct or remove it")
    for file in files:
        try:
            str(file).encode()
        except UnicodeEncodeError:
            raise Refused(f"file name {file.name!r} is not allowed: rename it, in UTF-8") from None
    return files


def metadata_of(pairs: Sequence[str]) -> str:
    """`key=value` pairs as a JSON object; a value that is JSON is taken as that."""
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise Refused(f"--metadata {pair!r} is no KEY=VALUE")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return json.dumps(found)


@contextmanager
def progress_line(what: str, total: int | None) -> Iterator[Told]:
    """One line on the terminal, gone when it is over; nothing where nobody looks."""
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task(what, total=total)
        yield lambda size: progress.advance(task, size)
