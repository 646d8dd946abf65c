"""Versions of many files: little state per file, and no database query per file."""

import hashlib
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from api.routes.v1.dataset_download import file_json, listing
from hanzo_ml.cli import dataset_checkout as checkouts
from hanzo_ml.cli.dataset_checkout import FilePart, RemoteFile, checkout_files
from recipes.records.record_reader import iterate_record_lines
from recipes.storage import chunking
from recipes.storage.chunking import Chunker
from recipes.storage.manifest import Artifact, Chunk, FileRecord, Manifest, canonical_json
from resources.datasets.deletion import delete_version
from resources.ingest.version_creation import create_version
from resources.metadata.database import Database
from resources.metadata.datasets import DatasetVersion
from resources.object_store.chunk_upload import BATCH_CHUNKS
from tests.resources.metadata.conftest import database, database_url, migrated_sqlite, postgres, postgres_url, sqlite_url
from tests.support.resources.query_plans import plans
from tests.support.resources.stored_versions import chunks, in_folder

__all__ = ["database", "database_url", "migrated_sqlite", "postgres", "postgres_url", "sqlite_url"]
FEW, MANY = 20, BATCH_CHUNKS + 20


def statements(database: Database, folder: Path, count: int) -> tuple[int, DatasetVersion]:
    """Create a version of `count` files; return its number of SQL statements and the version."""
    raw = folder / f"of-{count}"
    raw.mkdir()
    for number in range(count):
        (raw / f"{number:04}.jsonl").write_text(f'{{"of": {count}, "number": {number}}}\n')
    asked: list[str] = []

    def keep(*arguments: object) -> None:
        asked.append(str(arguments[2]))

    event.listen(database.engine, "before_cursor_execute", keep)
    version, _ = create_version(database, in_folder(folder), name=f"of-{count}", path=raw, user="u", organization="default")
    event.remove(database.engine, "before_cursor_execute", keep)
    return len(asked), version


def test_files_are_claimed_together_and_not_one_by_one(database: Database, tmp_path: Path) -> None:
    few, _ = statements(database, tmp_path, FEW)
    many, version = statements(database, tmp_path, MANY)
    # At most one more batch: a transaction, its claims and the driver's own statements.
    assert many - few <= 8
    store = in_folder(tmp_path)
    assert len(list(iterate_record_lines(store, version.artifact))) == MANY
    delete_version(database, store, version.id, "u")
    assert len(chunks(store)) == FEW + 2  # each file of the other version, its records and their index


def test_small_file_allocates_only_a_small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def counted(size: int = 0) -> bytearray:
        made.append(size)
        return bytearray(size)

    monkeypatch.setattr(chunking, "bytearray", counted, raising=False)
    chunker = Chunker()
    assert [*chunker.push(b"small"), *chunker.finish()] == [b"small"]
    assert sum(made) < chunking.MIN_CHUNK_BYTES


def test_a_checkout_opens_one_client_for_all_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Use the real client with canned responses and count how often one is created."""
    bodies = {f"http://server/{number}": f"{number}\n".encode() for number in range(FEW)}
    files = [remote(url, body, 1 + number % 2) for number, (url, body) in enumerate(bodies.items())]
    clients = []
    httpx = checkouts.httpx

    def answer(request: "checkouts.httpx.Request") -> "checkouts.httpx.Response":
        asked = request.url.params.get("part")
        body = bodies[str(request.url.copy_with(query=None))]
        return httpx.Response(200, stream=httpx.ByteStream(body[parts_of(body)[int(asked)]] if asked else body))

    class Counted(httpx.Client):
        def __init__(self, **options: object) -> None:
            clients.append(self)
            super().__init__(**{**options, "transport": httpx.MockTransport(answer)})  # type: ignore[arg-type]

    monkeypatch.setattr(checkouts.httpx, "Client", Counted)
    checkout_files(lambda: files, tmp_path / "to", "mark")
    assert len(clients) == 1
    assert {(tmp_path / "to" / file.path).read_bytes() for file in files} == set(bodies.values())


def parts_of(body: bytes) -> list[slice]:
    return [slice(0, 1), slice(1, len(body))]


def remote(url: str, body: bytes, count: int) -> RemoteFile:
    pieces = [body] if count == 1 else [body[part] for part in parts_of(body)]
    where = [url] if count == 1 else [f"{url}?part={number}" for number in range(count)]
    found = [FilePart(at, hashlib.sha256(piece).hexdigest(), len(piece)) for at, piece in zip(where, pieces, strict=True)]
    return RemoteFile(url.rpartition("/")[2], hashlib.sha256(body).hexdigest(), len(body), found)


def test_manifest_is_serialized_without_a_second_copy_of_its_files(tmp_path: Path) -> None:
    pieces = (Chunk(sha256="0" * 64, size=1),)
    files = tuple(FileRecord(path=f"{number:05}.jsonl", sha256="f" * 64, size=1, chunks=pieces) for number in range(5000))
    manifest = Manifest(kind="source", files=files, inputs={"b": "1", "a": "2"}, facts={"files": [], "zoë": {"é": None}})
    assert manifest.to_bytes() == canonical_json(manifest.model_dump(mode="json"))
    tracemalloc.start()
    artifact = in_folder(tmp_path).put_manifest("s3://hanzo-ml/datasets/d/1/source", manifest)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * len(manifest.to_bytes())
    assert artifact.digest == hashlib.sha256(manifest.to_bytes()).hexdigest() == manifest.digest


def test_listing_is_serialized_without_a_second_copy_of_its_files(tmp_path: Path) -> None:
    piece = Chunk(sha256="0" * 64, size=1)
    files = [FileRecord(path=f"é{number:05}.jsonl", sha256="f" * 64, size=1, chunks=(piece,)) for number in range(5000)]
    source = Artifact(kind="source", uri="s3://hanzo-ml/datasets/d/1/source", digest="0" * 64, size_bytes=5000)

    def file_entry(file: FileRecord) -> dict[str, Any]:
        return file_json(source, file, lambda uri, _: f"https://server/{uri}")

    written = listing({"dataset": "d@1", "url": None}, map(file_entry, files))
    assert json.loads(written) == {"dataset": "d@1", "url": None, "files": [file_entry(file) for file in files]}
    assert json.loads(listing({"url": "u"}, iter(()))) == {"url": "u", "files": []}
    tracemalloc.start()
    listing({"dataset": "d@1"}, map(file_entry, files))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * len(written)


def test_claims_of_a_version_are_read_from_an_index(database: Database, tmp_path: Path) -> None:
    _, version = statements(database, tmp_path, FEW)
    plan = plans(database, lambda: delete_version(database, in_folder(tmp_path), version.id, "u"))
    assert "chunk_claims_by_holder" in plan, plan
