"""Multipart dataset uploads: files unchanged at any number and size, and previews of long records."""

import gzip
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from recipes.contracts.dataset_formats import Format
from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Artifact
from resources.ingest.new_version import NewVersion
from resources.ingest.remote_sources import list_files
from resources.ingest.version_creation import create_from_files
from resources.lineage.edges import find_artifact, parent_digests
from resources.metadata.database import Database
from resources.settings.settings import Settings
from tests.api.artifact_server import on_s3
from tests.resources.ingest import test_version_creation as ingest
from tests.support.resources.record_files import WRITERS, packed_zstd
from tests.support.s3_server import S3Server

Packed = Callable[[bytes], bytes]


def written(writer: str, pack: Packed = bytes) -> Callable[[Path], tuple[str, bytes]]:
    """Return a format, and the bytes of a file in it."""

    def write(path: Path) -> tuple[str, bytes]:
        format, writes = WRITERS[writer]
        writes(path)
        return format, pack(path.read_bytes())

    return write


def text(pack: Packed = bytes) -> Callable[[Path], tuple[str, bytes]]:
    return lambda path: ("text", pack(b"one\ntwo\n"))


FILES = {
    "a.jsonl": written("jsonl"),
    "a.jsonl.gz": written("jsonl", gzip.compress),
    "a.jsonl.zst": written("jsonl", packed_zstd),
    "a.csv": written("csv"),
    "a.csv.gz": written("csv", gzip.compress),
    "a.csv.zst": written("csv", packed_zstd),
    "a.parquet": written("parquet"),
    "a.arrow": written("arrow file"),
    "stream.arrow": written("arrow stream"),
    "a.txt": text(),
    "a.txt.gz": text(gzip.compress),
    "a.txt.zst": text(packed_zstd),
}


def test_files_of_all_sizes_in_one_form_are_stored_unchanged(http: TestClient, settings: Settings) -> None:
    sizes = [1, 40, 100_000, 3_000_000, 1, 1 << 20, 2_000_000, 7]
    sent = {f"{number}.txt": (f"line {number}\n" * size).encode()[-size:] + b"x\n" for number, size in enumerate(sizes)}
    files = [("files", (name, data)) for name, data in sent.items()]
    answer = http.post("/v1/datasets", data={"name": "mixed", "format": "text"}, files=files)
    assert answer.status_code == 201, answer.text
    database, store = Database(settings.database_url), Store(settings.store)
    with database.read() as connection:
        records = Artifact.model_validate(answer.json()["artifact"])
        source = find_artifact(connection, parent_digests(connection, records.digest)["source"])
    database.close()
    assert source is not None
    stored = {file.path: file.sha256 for file in store.manifest(source).files}
    assert stored == {name: hashlib.sha256(data).hexdigest() for name, data in sent.items()}


def test_form_with_too_many_files_is_refused(http: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.routes.v1.upload_forms.MAX_FILES", 3)
    files = [("files", (f"{number}.jsonl", b'{"a": 1}\n')) for number in range(4)]
    answer = http.post("/v1/datasets", data={"name": "d"}, files=files)
    assert (answer.status_code, answer.json()["message"]) == (400, "Too many files. Maximum number of files is 3.")


@pytest.mark.requirement("B7")
def test_preview_is_truncated_at_its_byte_limit(http: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [json.dumps({"number": number, "text": "x" * 300}) for number in range(10)]
    made = http.post("/v1/datasets", data={"name": "long"}, files={"files": ("a.jsonl", "\n".join(lines))}).json()
    assert len(http.get(f"/v1/datasets/{made['id']}/preview?n=9").text.splitlines()) == 9
    monkeypatch.setattr("api.routes.v1.datasets.PREVIEW_BYTES", 1000)
    shown = http.get(f"/v1/datasets/{made['id']}/preview?n=9").text.splitlines()
    assert [json.loads(line)["number"] for line in shown] == [0, 1, 2, 3]


@pytest.mark.requirement("B15")
@pytest.mark.parametrize("name", FILES)
def test_each_format_is_accepted_as_form_and_as_raw_body(http: TestClient, tmp_path: Path, name: str) -> None:
    """Compressed or not; equal content gives one version."""
    format, data = FILES[name](tmp_path / "data")
    form = http.post("/v1/datasets", data={"name": "d", "format": format}, files={"files": (name, data)})
    assert (form.status_code, form.json()["num_records"]) == (201, 2), form.text
    params = {"name": "d", "file": name, "format": format}
    raw = http.post("/v1/datasets/raw", params=params, content=data)
    assert (raw.json()["created"], raw.json()["id"]) == (False, form.json()["id"])


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_each_format_is_accepted_from_a_bucket(s3: S3Server, tmp_path: Path, name: str) -> None:
    """As a folder and as a single object."""
    format, data = FILES[name](tmp_path / "data")
    settings = Settings.load({"HANZO_ML_HOME": str(tmp_path / "home"), **on_s3(s3)})
    s3.client.create_bucket(Bucket="raw")
    try:
        s3.client.put_object(Bucket="raw", Key=f"{format}/in/{name}", Body=data)
        place = ingest.Place(tmp_path)
        new = NewVersion("d", format, "u", "default")
        made = [
            create_from_files(place.database, place.store, new, list_files(settings, address, Format(format)))
            for address in (f"s3://raw/{format}", f"s3://raw/{format}/in/{name}")
        ]
        (folder, is_new), (single, _) = made
        assert (folder.num_records, is_new) == (2, True)
        assert single.content_sha256 == folder.content_sha256
    finally:
        s3.client.delete_object(Bucket="raw", Key=f"{format}/in/{name}")
        s3.client.delete_bucket(Bucket="raw")
