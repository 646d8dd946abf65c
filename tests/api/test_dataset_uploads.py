"""Uploads in a form: each file as it was sent, however many and large they are; and what is shown of long records."""

import hashlib
import json

import pytest
from fastapi.testclient import TestClient

from recipes.schema import Artifact
from recipes.store import Store
from resources.lineage.record import find, parents
from resources.metadata.database import Database
from resources.settings import Settings


def test_files_of_all_sizes_in_one_form_are_each_what_was_sent(http: TestClient, settings: Settings) -> None:
    sizes = [1, 40, 100_000, 3_000_000, 1, 1 << 20, 2_000_000, 7]
    sent = {f"{number}.txt": (f"line {number}\n" * size).encode()[-size:] + b"x\n" for number, size in enumerate(sizes)}
    files = [("files", (name, data)) for name, data in sent.items()]
    answer = http.post("/v1/datasets", data={"name": "mixed", "format": "text"}, files=files)
    assert answer.status_code == 201, answer.text
    database, store = Database(settings.database_url), Store(settings.store)
    with database.read() as connection:
        records = Artifact.model_validate(answer.json()["artifact"])
        source = find(connection, parents(connection, records.digest)["source"])
    database.close()
    assert source is not None
    stored = {file.path: file.sha256 for file in store.manifest(source).files}
    assert stored == {name: hashlib.sha256(data).hexdigest() for name, data in sent.items()}


def test_too_many_files_are_refused_in_words(http: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.v1.datasets.upload_form.MAX_FILES", 3)
    files = [("files", (f"{number}.jsonl", b'{"a": 1}\n')) for number in range(4)]
    answer = http.post("/v1/datasets", data={"name": "d"}, files=files)
    assert (answer.status_code, answer.json()["message"]) == (400, "Too many files. Maximum number of files is 3.")


def test_a_preview_ends_where_it_becomes_long(http: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [json.dumps({"number": number, "text": "x" * 300}) for number in range(10)]
    made = http.post("/v1/datasets", data={"name": "long"}, files={"files": ("a.jsonl", "\n".join(lines))}).json()
    assert len(http.get(f"/v1/datasets/{made['id']}/preview?n=9").text.splitlines()) == 9
    monkeypatch.setattr("api.v1.datasets.read.PREVIEW_BYTES", 1000)
    shown = http.get(f"/v1/datasets/{made['id']}/preview?n=9").text.splitlines()
    assert [json.loads(line)["number"] for line in shown] == [0, 1, 2, 3]
