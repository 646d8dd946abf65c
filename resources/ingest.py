"""Raw files -> a dataset version: read, check every record, store source and records, record the version.

Everything is checked before anything is stored: a refused file leaves no trace. Asset, API and command line all end here.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pydantic import JsonValue

from recipes.schema import canonical_json
from recipes.store import Store, describe
from resources.errors import invalid
from resources.lineage.record import record
from resources.metadata.database import Database
from resources.metadata.datasets import Datasets, DatasetVersion, checked_name, new_id
from resources.metadata.experiments import DEFAULT_ORGANIZATION
from resources.metadata.outbox import now_ms

REQUIRED = ("instruction", "answer")
OPTIONAL = ("key",)
FORMATS = ("jsonl",)
SHOWN = 3


def source_files(path: Path, format: str) -> list[Path]:
    """The files that `--path` means: one file, or all of that format in a folder."""
    if format not in FORMATS:
        raise invalid(f"format '{format}' is not supported yet: use {' or '.join(FORMATS)}")
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise invalid(f"there is no file or folder {path.name}: check --path")
    found = sorted(path.rglob(f"*.{format}"))
    if not found:
        raise invalid(f"folder {path.name} holds no *.{format} file")
    return found


def lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that hold something, with their numbers. A line ends at "\\n" and nowhere else."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if raw.strip():
                yield number, raw


def problems(path: Path) -> Iterator[str]:
    """What is wrong with a file of records: line number and reason each."""
    number = 0
    for number, raw in lines_of(path):
        if reason := problem(raw):
            yield f"{path.name}, line {number}: {reason}"
    if not number:
        yield f"{path.name} is empty: a dataset needs at least one record"


def problem(raw: bytes) -> str | None:
    """What is wrong with one line, or None."""
    try:
        row = parse(raw)
        canonical_json(row)  # Python reads more than JSON knows, and would fail on storing it
    except UnicodeDecodeError:
        return "not UTF-8"
    except json.JSONDecodeError as error:
        return f"not JSON ({error.msg}, column {error.colno})"
    except UnicodeEncodeError:
        return "holds half a character (a lone surrogate)"
    except RecursionError:
        return "nested too deeply"
    except ValueError:
        return "holds a number that is not finite or has too many digits"
    if not isinstance(row, dict):
        return "not a JSON object"
    for name in (*REQUIRED, *(name for name in OPTIONAL if name in row)):
        if not isinstance(row.get(name), str) or not row[name].strip():
            return f"'{name}' must be a text that is not empty"
    return None


def parse(raw: bytes) -> Any:
    """One line as JSON. A byte order mark, as some editors write it, is no part of it."""
    return json.loads(raw.decode("utf-8-sig"))


def read_rows(files: Sequence[Path]) -> list[dict[str, Any]]:
    """All records. Raises on bad ones, naming the first few and how many there are."""
    found = [reason for path in files for reason in problems(path)]
    if found:
        more = f" (and {len(found) - SHOWN} more)" if len(found) > SHOWN else ""
        raise invalid(f"{'; '.join(found[:SHOWN])}{more}. Nothing was stored: correct the file and create it again")
    return [parse(raw) for path in files for _, raw in lines_of(path)]


def schema_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Column -> type name, over all records; a column that is not always there ends in `?`."""
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    columns = sorted({column for row in rows for column in row})
    schema = {}
    for column in columns:
        kinds = {names.get(type(row[column]), "null") for row in rows if column in row}
        schema[column] = "|".join(sorted(kinds)) + ("" if all(column in row for row in rows) else "?")
    return schema


def place_of(organization: str, name: str, number: int) -> str:
    """Where a version lies. No dataset's name begins with '@', so that no organization's folder is a dataset's."""
    folder = "" if organization == DEFAULT_ORGANIZATION else f"@{quote(organization, safe='')}/"
    return f"s3://hanzo-ml/datasets/{folder}{name}/{number}"


def create_version(
    database: Database,
    store: Store,
    *,
    name: str,
    path: Path,
    format: str = "jsonl",
    user: str,
    organization: str,
    tags: Sequence[str] = (),
    metadata: Mapping[str, JsonValue] | None = None,
) -> tuple[DatasetVersion, bool]:
    """Make a version of the files at `path`. Returns it, and whether it is new: equal content is the version it was.

    Raises:
        HanzoError: bad name, format, file or record; nothing was stored.
    """
    checked_name(name)
    files = source_files(path, format)
    rows = read_rows(files)
    datasets = Datasets(database)
    with tempfile.TemporaryDirectory() as scratch:
        source, records = Path(scratch) / "source", Path(scratch) / "records"
        for file in files:
            target = source / (file.relative_to(path) if path.is_dir() else file.name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
        records.mkdir()
        (records / "records.jsonl").write_bytes(b"".join(canonical_json(row) + b"\n" for row in rows))
        content = describe(records)[0].sha256
        # Number, files and row under one lock: a second writer waits, then finds the version or takes the next number. A
        # kill in between leaves files that no row names; the next attempt writes over them.
        with database.write() as connection:
            if existing := datasets.with_content(connection, organization, name, content):
                return existing, False
            number = datasets.next_version(connection, organization, name)
            place = place_of(organization, name, number)
            raw = store.publish(source, f"{place}/source", "source", facts={"format": format})
            facts: dict[str, JsonValue] = {"num_records": len(rows), "transform": "canonical JSON lines"}
            artifact = store.publish(records, f"{place}/records", "dataset", inputs={"source": raw.digest}, facts=facts)
            record(connection, raw, store.manifest(raw))
            record(connection, artifact, store.manifest(artifact))
            version = DatasetVersion(
                id=new_id(),
                name=name,
                version=number,
                organization=organization,
                created_at=now_ms(),
                created_by=user,
                storage_path=f"{place}/",
                format=format,
                size_bytes=raw.size_bytes,
                num_records=len(rows),
                schema=schema_of(rows),
                splits={},
                metadata=dict(metadata or {}),
                tags=list(tags),
                lineage={"parent_datasets": [], "transform": "none: as uploaded"},
                content_sha256=content,
                artifact=artifact,
            )
            datasets.add(connection, version)
    return version, True
