"""Upload files, query rows or source addresses as a dataset version."""

import io
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import parse_qs, urlsplit

import httpx
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from hanzo_ml.cli.connection import Refused, call
from recipes.contracts.dataset_formats import ENDINGS, MixedSplits, detect_formats, is_hidden, select_files, walk_files
from recipes.records.sql_query import BadQuery, iterate_query_lines

# `--since`: continue a topic where a version's messages ended.


def continue_topic(address: str, version: Mapping[str, Any]) -> str:
    """The topic's address from the end of a version on.

    Raises:
        Refused: the version is of another topic.
    """
    parts = urlsplit(address)
    if parts.scheme != "kafka" or "from" in parse_qs(parts.query):
        raise Refused("--since needs --path kafka://BROKER/TOPIC without from=: it sets where the messages begin")
    reference = f"{version['name']}@{version['version']}"
    for origin in version["lineage"].get("origins", ()):
        before = urlsplit(origin)
        if before.scheme == "kafka" and before.path.strip("/") == parts.path.strip("/"):
            first = f"from={parse_qs(before.query)['until'][0]}"
            return parts._replace(query="&".join(filter(None, (first, parts.query)))).geturl()
    raise Refused(f"{reference} was not made from the topic '{parts.path.strip('/')}': set --since to a version that was")


# What `hanzo-ml dataset create` sends: local files in a form, rows of a query as a body, an address or a query for the
# server.

SOURCE_PREFIXES = ("s3://", "file://", "kafka://")
"""Schemes of sources that the server fetches."""
UPLOAD_TIMEOUT = httpx.Timeout(30.0, read=None, write=600.0)
"""No read timeout: the server answers after it has checked all records."""
DATASETS_ROUTE = "/v1/datasets"
ReportProgress = Callable[[int], None]


class ProgressFile(io.RawIOBase):
    """A file that reports progress and is open only while it is read."""

    def __init__(self, path: Path, report: ReportProgress) -> None:
        self._path = path
        self._report = report
        self._size = path.stat().st_size
        self._position = 0
        self._file: BinaryIO | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._file is None:
            self._file = self._path.open("rb")
            self._file.seek(self._position)
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        self._position += len(data)
        self._report(len(data))
        if not data:
            self._close_file()
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Support the seek by which the HTTP library finds the file's length."""
        self._close_file()
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def close(self) -> None:
        self._close_file()
        super().close()

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def send_files(name: str, fields: dict[str, Any]) -> Any:
    """Upload a file, or all of the format in a folder."""
    if "://" in name:
        raise Refused(f"{name} cannot be fetched: use a file of this machine, s3://..., file://... or kafka://...")
    path = Path(name)
    files, skipped = list_local_files(path, str(fields["format"]), str(fields["name"]))
    total = sum(file.stat().st_size for file in files)
    is_folder = path.is_dir()
    with show_progress("uploading", total) as report:
        names = [file.relative_to(path).as_posix() if is_folder else file.name for file in files]
        parts = [("files", (name, ProgressFile(file, report))) for name, file in zip(names, files, strict=True)]
        made = call("POST", DATASETS_ROUTE, data=fields, files=parts, timeout=UPLOAD_TIMEOUT)
    return {**made, "skipped": sorted([*skipped, *made.get("skipped", ())])} if skipped else made


def send_query(database: str, statement: str, fields: dict[str, Any]) -> Any:
    """Upload the rows of a query as JSON lines."""
    with show_progress("reading the query's rows", None) as report:

        def body() -> Iterator[bytes]:
            for block in iterate_query_lines(database, statement):
                report(len(block))
                yield block

        try:
            return call(
                "POST",
                f"{DATASETS_ROUTE}/raw",
                params={**fields, "file": "query.jsonl"},
                content=body(),
                timeout=UPLOAD_TIMEOUT,
            )
        except BadQuery as problem:
            raise Refused(str(problem)) from None


def request_query(database: str, statement: str, fields: dict[str, Any]) -> Any:
    """Have the server query a database that its settings name."""
    return call("POST", DATASETS_ROUTE, data={**fields, "sql": statement, "database": database}, timeout=UPLOAD_TIMEOUT)


def send_address(address: str, fields: dict[str, Any]) -> Any:
    """Have the server fetch the files."""
    return call("POST", DATASETS_ROUTE, data={**fields, "source": address}, timeout=UPLOAD_TIMEOUT)


def detect_format(path: str) -> str:
    """Detect the format from file names; JSON lines if they say nothing.

    Text is never detected, because anything can be read as text, also JSON lines in a `.txt`.
    """
    if path.startswith("kafka://"):  # the name of a topic may end as anything
        return "jsonl"
    folder = Path(path)
    names = (name for name in walk_files(folder) if not is_hidden(name)) if folder.is_dir() else (path,)
    found = detect_formats(names)
    if len(found) > 1:
        raise Refused(f"folder {path} holds files of the formats {', '.join(found)}: choose one with --format")
    return found[0] if found else "jsonl"


def list_local_files(path: Path, format: str, name: str = "NAME") -> tuple[Sequence[Path], Sequence[str]]:
    """The files to send, and the paths of those in a folder that are skipped."""
    if not path.exists():
        raise Refused(f"there is no file or folder {path}: check --path")
    skipped: Sequence[str] = ()
    files = [path]
    if path.is_dir():
        try:
            selected = select_files(walk_files(path), format)
        except MixedSplits as mixed:
            part = str(path / mixed.first)
            command = shlex.join(["hanzo-ml", "dataset", "create", "--name", name, "--path", part])
            raise Refused(f"folder {path} is not one dataset: {mixed.advice(command)}") from None
        files, skipped = [path / found for found in selected.chosen], selected.skipped
    if not files:
        ending = ENDINGS.get(format, (f".{format}",))[0]
        unread = f" that is read ({', '.join(skipped)} is not)" if skipped else ""
        raise Refused(f"folder {path} holds no *{ending} file{unread}: check --path and --format")
    if unread_links := [file for file in files if not file.is_file()]:
        raise Refused(f"{unread_links[0]} is a broken link, or not a regular file: correct or remove it")
    for file in files:
        try:
            str(file).encode()
        except UnicodeEncodeError:
            raise Refused(f"file name {file.name!r} is not UTF-8: rename it") from None
    return files, skipped


def parse_metadata(pairs: Sequence[str]) -> str:
    """`key=value` pairs as a JSON object; a value that is valid JSON is parsed."""
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise Refused(f"--metadata {pair!r} is not KEY=VALUE: write --metadata source=web, for example")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return json.dumps(found)


@contextmanager
def show_progress(what: str, total: int | None) -> Iterator[ReportProgress]:
    """Show a transient progress bar on a terminal; nothing elsewhere."""
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task(what, total=total)
        yield lambda size: progress.advance(task, size)
