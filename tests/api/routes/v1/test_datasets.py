"""/v1/datasets against a server process, over a folder and over S3."""

import hashlib
import json
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import httpx
import pytest

from api.artifacts.file_response import SAFE_HEADERS
from api.artifacts.signed_links import SignedLink
from recipes.records.record_reader import iterate_record_lines
from recipes.storage.artifact_store import Store
from recipes.storage.line_selection import bitmap_uri
from recipes.storage.locations import chunk_folder, chunk_uri
from recipes.storage.manifest import Artifact
from resources.datasets.prepared_versions import split_row
from resources.errors import HanzoError
from resources.metadata.database import Database
from resources.metadata.datasets import Datasets
from tests.api.artifact_server import on_s3
from tests.api.conformance import Conformance
from tests.api.conftest import answering, migrated
from tests.api.waiting import wait_for
from tests.support.cli.command_line import run
from tests.support.resources.splits import divided
from tests.support.s3_server import BUCKETS, VARIABLES, S3Server
from tests.support.server_process import ServerProcess

DRAW = random.Random(0)
ROWS = [{"id": number, "text": " ".join(map(str, DRAW.choices(range(5000), k=200)))} for number in range(4000)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
"""Several chunks."""


@pytest.fixture(scope="module")
def server(server_on_either: ServerProcess) -> ServerProcess:
    return server_on_either


@pytest.fixture
def http(server: ServerProcess, conformance: Conformance) -> Iterator[httpx.Client]:
    hooks = {"response": [conformance.check]}
    with httpx.Client(base_url=server.url, timeout=120, trust_env=False, event_hooks=hooks) as client:
        yield client


def create(http: httpx.Client, name: str, content: bytes = LINES, **fields: Any) -> dict[str, Any]:
    files = {"files": (f"{name}.jsonl", content)}
    answer = http.post("/v1/datasets", data={"name": name, **fields}, files=files)
    assert answer.status_code in (200, 201), answer.text
    made: dict[str, Any] = answer.json()
    return made


def joined(file: dict[str, Any]) -> bytes:
    data = b"".join(httpx.get(part["url"], trust_env=False).raise_for_status().content for part in file["parts"])
    assert (hashlib.sha256(data).hexdigest(), len(data)) == (file["sha256"], file["size"])
    return data


def ranged(part: dict[str, Any], asked: str) -> tuple[int, bytes, str]:
    answer = httpx.get(part["url"], headers={"Range": asked}, trust_env=False)
    return answer.status_code, answer.content, answer.headers["content-range"]


@pytest.mark.requirement("B2", "B4", "B5")
def test_version_is_created_previewed_and_downloaded_unchanged(http: httpx.Client) -> None:
    made = create(http, "corpus", tags=["a", "b"], metadata='{"pii": false}')
    assert made["created"] and (made["version"], made["num_records"], made["metadata"]) == (1, 4000, {"pii": False})
    assert made["storage_path"] == "s3://hanzo-ml/datasets/corpus/1/"
    assert http.get(f"/v1/datasets/{made['id']}").json() == {key: made[key] for key in made if key != "created"}
    lines = http.get(f"/v1/datasets/{made['id']}/preview", params={"n": 3}).text.splitlines()
    assert list(map(json.loads, lines)) == ROWS[:3]
    found = http.get(f"/v1/datasets/{made['id']}/download").json()
    assert found["url"] is None and [file["path"] for file in found["files"]] == ["corpus.jsonl"]
    assert len(found["files"][0]["parts"]) > 1
    assert joined(found["files"][0]) == LINES
    (records,) = http.get(f"/v1/datasets/{made['id']}/download", params={"content": "records"}).json()["files"]
    assert list(map(json.loads, joined(records).splitlines())) == ROWS
    assert not create(http, "corpus")["created"]


def test_uploaded_html_is_never_served_executable(server: ServerProcess, http: httpx.Client) -> None:
    made = create(http, "page", b'{"text": "<script>alert(1)</script>"}\n')
    link = http.get(f"/v1/datasets/{made['id']}/download").json()["url"]
    shown = [http.get(f"/v1/datasets/{made['id']}/preview")]
    if link.startswith(server.url):  # a link of the object store has another origin
        shown += [
            http.get(link),
            http.get(link, headers={"Range": "bytes=0-3"}),
            http.get(link, headers={"Range": "bytes=99-"}),
        ]
    for answer in shown:
        for name, value in SAFE_HEADERS.items():
            assert answer.headers.get_list(name) == [value], answer.status_code
    assert [answer.status_code for answer in shown[1:]] in ([], [200, 206, 416])


@pytest.mark.requirement("B3")
def test_dataset_list_is_empty_for_another_organization(http: httpx.Client) -> None:
    made = create(http, "whose", b'{"a": 1}\n')

    def found(**params: str) -> list[str]:
        return [version["id"] for version in http.get("/v1/datasets", params=params).json()["datasets"]]

    assert made["id"] in found(org="default") and found(org="acme") == []
    assert found(org="default", name="whose") == [made["id"]]


def test_split_is_downloaded_with_all_its_files(server: ServerProcess, http: httpx.Client, tmp_path: Path) -> None:
    made = create(http, "parted", b'{"a": 1}\n')
    path = f"/v1/datasets/{made['id']}/download"
    refused = http.get(path, params={"content": "test"})
    assert (refused.status_code, "no split 'test' yet" in refused.text) == (404, True)
    (tmp_path / "test-00000.jsonl").write_bytes(b'{"a":1}\n')
    (tmp_path / "test-00000.arrow").write_bytes(b"tokens")
    store = Store(server.settings.store, VARIABLES)
    artifact = store.publish(tmp_path, f"{made['storage_path']}splits/test", "split")
    database = Database(server.settings.database_url)
    with database.write() as connection:
        datasets = Datasets(database)
        datasets.set_splits(connection, datasets.get(made["id"], connection), {"test": split_row(artifact, 1)})
    files = http.get(path, params={"content": "test"}).json()["files"]
    assert {file["path"]: joined(file) for file in files} == {
        "test-00000.arrow": b"tokens",
        "test-00000.jsonl": b'{"a":1}\n',
    }
    assert http.get(path, params={"content": "tests"}).status_code == 400
    assert http.get(path, params={"content": "rejected"}).status_code == 404
    store.publish(tmp_path, f"{made['storage_path']}rejected", "rejected")
    rejected = http.get(path, params={"content": "rejected"}).json()["files"]
    assert [joined(file) for file in rejected] == [joined(file) for file in files]


def split(server: ServerProcess, store: Store, folder: Path, made: dict[str, Any]) -> dict[str, Artifact]:
    """Divide a version into splits, as the asset graph does."""
    database = Database(server.settings.database_url)
    datasets = Datasets(database)
    with database.read() as connection:
        version = datasets.get(made["id"], connection)
    splits = divided(database, store, folder, version)
    with database.write() as connection:
        stored = {
            name: split_row(found, sum(1 for _ in iterate_record_lines(store, found))) for name, found in splits.items()
        }
        datasets.set_splits(connection, version, stored)
    return splits


def test_split_stored_as_line_selection_is_downloaded_as_one_file(
    server: ServerProcess, http: httpx.Client, tmp_path: Path
) -> None:
    """No object contains these bytes, on S3 neither: this server assembles them."""
    made = create(http, "chosen", b"".join(b'{"text": "%d"}\n' % number for number in range(40)))
    store = Store(server.settings.store, VARIABLES)
    splits = split(server, store, tmp_path, made)
    for name, count in {"train": 32, "validation": 4, "test": 4}.items():
        (file,) = http.get(f"/v1/datasets/{made['id']}/download", params={"content": name}).json()["files"]
        whole = joined(file)
        assert whole.count(b"\n") == count
        (part,) = file["parts"]
        assert ranged(part, "bytes=10-") == (206, whole[10:], f"bytes 10-{len(whole) - 1}/{len(whole)}")
        assert ranged(part, "bytes=3-20")[1] == whole[3:21]
        assert ranged(part, f"bytes={len(whole)}-") == (416, b"", f"bytes */{len(whole)}")
        done = run(server.url, "dataset", "checkout", "chosen@1", "--split", name, "--to", str(tmp_path / f"out-{name}"))
        assert (done.returncode, done.stderr) == (0, "")
        assert (tmp_path / f"out-{name}" / file["path"]).read_bytes() == whole
    assert httpx.get(part["url"].replace("test-00000", "test-00001"), trust_env=False).status_code == 403
    store.remove(bitmap_uri(splits["test"].uri, file["path"]))
    broken = httpx.get(part["url"], trust_env=False)
    assert (broken.status_code, broken.json()["error_code"]) == (409, "DATA_LOSS"), "no other link would lead to more"
    store.delete(splits["test"].uri)
    gone = httpx.get(part["url"], trust_env=False)
    assert (gone.status_code, "ask for a new link" in gone.text) == (404, True)


@pytest.mark.parametrize(
    "metadata", ['{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}', '{"a": ["\\u0000"]}', "[" * 100_000, "[1]"]
)
def test_metadata_that_is_no_valid_json_object_is_refused(http: httpx.Client, metadata: str) -> None:
    """One such version made the organization's list of all versions an error."""
    made = create(http, "described", b'{"a": 1}\n')
    answer = http.post(
        "/v1/datasets", data={"name": "bad", "metadata": metadata}, files={"files": ("a.jsonl", b'{"a": 2}\n')}
    )
    assert answer.status_code == 400 and "metadata" in answer.json()["message"]
    edited = http.patch(f"/v1/datasets/{made['id']}", content=f'{{"metadata": {metadata}}}')
    assert edited.status_code == 400
    assert [each["metadata"] for each in http.get("/v1/datasets", params={"name": "described"}).json()["datasets"]] == [{}]
    assert http.get("/v1/datasets", params={"name": "bad"}).json() == {"datasets": []}


@pytest.mark.parametrize("file", ["n" * 241, "ä" * 121, "d/" * 510 + "f"])
def test_overlong_file_name_is_refused(http: httpx.Client, file: str) -> None:
    answer = http.post("/v1/datasets/raw", params={"name": "long", "file": file}, content=b'{"a": 1}\n')
    assert answer.status_code == 400 and "at most 240 bytes in a name, and 1024 in all" in answer.json()["message"]


@pytest.mark.parametrize("tag", [" ", "a\0"])
def test_unsearchable_tag_is_refused(http: httpx.Client, tag: str) -> None:
    made = create(http, "tagged", b'{"a": 1}\n', tags=["fine"])
    answers = [
        http.patch(f"/v1/datasets/{made['id']}", json={"tags": [tag]}),
        http.post("/v1/datasets/raw", params={"name": "x", "file": "x.jsonl", "tags": [tag]}, content=b'{"a": 3}\n'),
    ]
    assert [(answer.status_code, "is not allowed" in answer.text) for answer in answers] == [(400, True)] * 2
    assert [each["id"] for each in http.get("/v1/datasets", params={"tags": ["fine"]}).json()["datasets"]] == [made["id"]]


@pytest.mark.parametrize("reference", ["whole@²", "whole@99999999999999999999", "whole@", "@1", "whole@1@2", "whole@-1"])
def test_malformed_version_reference_is_refused(http: httpx.Client, reference: str) -> None:
    made = create(http, "whole", b'{"a": 1}\n')
    answer = http.get(f"/v1/datasets/{made['id']}/diff", params={"against": reference})
    assert answer.status_code == 400 and "write NAME or NAME@VERSION" in answer.text


def test_lost_or_changed_chunk_is_reported_and_repaired_by_uploading_again(
    server: ServerProcess, http: httpx.Client
) -> None:
    content = b'{"text": "only this version says that"}\n'
    made = create(http, "broken", content)
    store = Store(server.settings.store, VARIABLES)
    (file,) = store.manifest(Artifact.model_validate(made["artifact"])).files
    chunk = chunk_uri(made["artifact"]["uri"], file.chunks[0].sha256)
    whole = store.get_bytes(chunk)
    for damage in (lambda: store.put_bytes(chunk, b"x" * len(whole)), lambda: store.remove(chunk)):
        damage()
        answers = [
            http.get(f"/v1/datasets/{made['id']}/preview"),
            http.get(f"/v1/datasets/{made['id']}/diff", params={"against": "broken@1"}),
            http.post("/v1/datasets/trace", json={"match": "only this version says that"}),
        ]
        for answer in answers:
            assert (answer.status_code, answer.json()["error_code"]) == (409, "DATA_LOSS")
            assert (
                "cannot be read completely" in answer.text and "create the version again from the same files" in answer.text
            )
    assert not create(http, "broken", content)["created"]
    assert http.get(f"/v1/datasets/{made['id']}/preview").content == b'{"text":"only this version says that"}\n'


def test_raw_body_upload_creates_a_version(http: httpx.Client) -> None:
    def body() -> Iterator[bytes]:
        for start in range(0, len(LINES), 99_999):
            yield LINES[start : start + 99_999]

    params = {"name": "raw", "file": "inner/a.jsonl", "tags": ["x"]}
    answer = http.post("/v1/datasets/raw", params=params, content=body())
    assert (answer.status_code, answer.json()["num_records"], answer.json()["tags"]) == (201, 4000, ["x"])
    for name in ("../a", "/etc/passwd", "", ".."):
        assert http.post("/v1/datasets/raw", params={**params, "file": name}, content=b"{}\n").status_code == 400


@pytest.mark.requirement("B6")
def test_signed_link_is_valid_only_for_its_object_and_time(server: ServerProcess, http: httpx.Client) -> None:
    made = create(http, "linked", b'{"a": 1}\n')
    found = http.get(f"/v1/datasets/{made['id']}/download", params={"seconds": 60}).json()
    link = found["url"]
    assert httpx.get(link, trust_env=False).content == b'{"a": 1}\n'
    if not link.startswith(server.url):
        assert "X-Amz-Signature" in link
        return
    parts = urlsplit(link)
    query = {name: values[0] for name, values in parse_qs(parts.query).items()}
    other = create(http, "other", b'{"b": 1}\n')
    for change in (
        {"uri": f"{other['storage_path']}{other['id'][:8]}/records/manifest.json"},
        {"expires_at": str(int(query["expires_at"]) + 1)},
        {"organization": "acme"},
        {"signature": "0" * 64},
        {"signature": "é"},
    ):
        answer = http.get(f"{parts.path}?{urlencode({**query, **change})}")
        assert answer.status_code == 403, change
    key = server.home / "link-key"
    assert key.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("content", ["source", "records", "train"])
def test_signed_link_serves_no_byte_of_corrupt_content(
    server: ServerProcess, http: httpx.Client, tmp_path: Path, content: str
) -> None:
    """Links to parts of a version bypassed every hash check."""
    name = f"broken-{content}"
    made = create(http, name, "".join(f'{{"text": "{name} {n}"}}\n' for n in range(20)).encode())
    if content == "train":
        split(server, Store(server.settings.store, VARIABLES), tmp_path, made)
    [file] = http.get(f"/v1/datasets/{made['id']}/download", params={"content": content}).json()["files"]
    links = [part["url"] for part in file["parts"]]
    if server.settings.storage.endpoint:  # it serves its own links
        return
    whole = [httpx.get(link, trust_env=False) for link in links]
    assert [answer.status_code for answer in whole] == [200] * len(links)
    chunks = (path for path in (server.home / "objects").glob("**/_chunks/**/*") if path.is_file())
    ruined = [path for path in chunks if name.encode() in path.read_bytes()]
    for path in ruined:
        path.write_bytes(path.read_bytes().replace(name.encode(), name.upper().encode()))
    assert ruined
    for asked in ({}, {"Range": "bytes=0-4"}):
        answer = httpx.get(links[0], trust_env=False, headers=asked)
        assert (answer.status_code, answer.json()["error_code"]) == (409, "DATA_LOSS")
    if content != "train":
        events = http.get("/v1/audit", params={"type": "artifact.broken", "limit": 1000}).json()["events"]
        assert {path.name for path in ruined} & {event["payload"]["uri"].rpartition("/")[2] for event in events}


def test_s3_link_expires_after_the_requested_time(tmp_path: Path, s3_session: S3Server) -> None:
    """One hour by default; S3 enforces the lifetime in the link."""
    with answering(migrated(tmp_path, **on_s3(s3_session))) as client:
        made = create(client, "for-a-while", b'{"a": 1}\n')
        for asked, holds in (({"seconds": 60}, "60"), ({}, "3600")):
            link = client.get(f"/v1/datasets/{made['id']}/download", params=asked).json()["url"]
            assert parse_qs(urlsplit(link).query)["X-Amz-Expires"] == [holds]


@pytest.mark.requirement("B6")
@pytest.mark.parametrize("public", ["", "http://files.example:9000"])
def test_s3_links_use_the_public_endpoint_when_configured(tmp_path: Path, s3_session: S3Server, public: str) -> None:
    """The server's own endpoint may be a name that only resolves inside of the cluster."""
    settings = migrated(tmp_path, **on_s3(s3_session), **({"HANZO_ML_STORAGE_PUBLIC_ENDPOINT": public} if public else {}))
    with answering(settings) as client:
        made = create(client, f"reached{len(public)}", b'{"a": 1}\n')
        link = client.get(f"/v1/datasets/{made['id']}/download").json()["url"]
    assert link.startswith(f"{public or s3_session.url}/") and "X-Amz-Signature" in link


def test_signed_link_expires_and_its_signature_is_checked() -> None:
    link, key = SignedLink("default", "s3://hanzo-ml/datasets/d/1/x", 1000), b"k" * 32
    signature = parse_qs(link.query(key))["signature"][0]
    link.check(signature, key, now=1000)
    with pytest.raises(HanzoError, match="expired"):
        link.check(signature, key, now=1001)
    with pytest.raises(HanzoError, match="not issued"):
        link.check(signature, b"another key", now=1000)


@pytest.mark.requirement("B10")
def test_diff_reports_changes_between_versions(http: httpx.Client) -> None:
    first = create(http, "changing", b'{"id": 1, "a": 1}\n{"id": 2, "a": 2}\n')
    second = create(http, "changing", b'{"id": 2, "a": "x"}\n{"id": 3, "a": 3}\n')
    for against in (first["id"], "changing@1"):
        found = http.get(f"/v1/datasets/{second['id']}/diff", params={"against": against, "key": "id"}).json()
        assert [found[kind] for kind in ("added", "removed", "changed", "unchanged")] == [1, 1, 1, 0]
        assert found["schema_changed"] == {"a": ["integer", "integer|string"]}
    assert http.get(f"/v1/datasets/{second['id']}/diff", params={"against": "nobody@1"}).status_code == 404
    assert http.get(f"/v1/datasets/{second['id']}/lineage").json()["parents"] == []


@pytest.mark.requirement("B1")
def test_only_tags_and_metadata_can_be_edited(http: httpx.Client) -> None:
    made = create(http, "edited", b'{"a": 1}\n')
    create(http, "edited-too", b'{"a": 1}\n')
    path = f"/v1/datasets/{made['id']}"
    changed = http.patch(path, json={"tags": ["new"]}).json()
    assert (changed["tags"], changed["metadata"]) == (["new"], {})
    assert http.patch(path, json={"metadata": {"source": "crawl"}}).json()["tags"] == ["new"]
    found = http.get("/v1/datasets", params={"tags": ["new"]}).json()["datasets"]
    assert [version["id"] for version in found] == [made["id"]]
    assert http.patch(path, json={"num_records": 5}).status_code == 400
    pages = [http.get("/v1/datasets", params={"max_results": 1}).json()]
    while token := pages[-1].get("next_page_token"):
        pages.append(http.get("/v1/datasets", params={"max_results": 1, "page_token": token}).json())
    names = [page["datasets"][0]["name"] for page in pages]
    assert len(names) > 1 and names == sorted(names)


@pytest.mark.requirement("B19")
def test_unused_version_is_deleted_and_deleting_one_in_use_is_refused(http: httpx.Client) -> None:
    made = create(http, "used", b'{"instruction": "x", "answer": "y"}\n')
    job = http.post("/v1/jobs", json={"name": "j", "dataset": "used"}).json()["id"]
    refused = http.delete(f"/v1/datasets/{made['id']}")
    assert refused.status_code == 409 and f"job {job}" in refused.json()["message"]
    other = create(http, "unused", b'{"a": 1}\n')
    assert http.delete(f"/v1/datasets/{other['id']}").json() == {"deleted": "unused@1"}
    assert http.get(f"/v1/datasets/{other['id']}").status_code == 404
    assert create(http, "unused", b'{"a": 1}\n')["version"] == 2


@pytest.mark.requirement("X9")
@pytest.mark.parametrize(
    "source",
    [
        "file:///etc/passwd",
        "{allowed}/../secret.jsonl",
        "{allowed}/link.jsonl",
        "{allowed}-beside/a.jsonl",
        "s3://raw-files/ours-not/a.jsonl",
        "s3://raw-files/ours/../theirs/a.jsonl",
        "s3://hanzo-ml-datasets/datasets",
        "s3://169.254.169.254/latest",
        "http://169.254.169.254/latest/meta-data",
        "/etc/passwd",
        "gopher://x",
        "kafka://127.0.0.1:1/orders",
        "",
    ],
)
def test_source_not_allowed_by_the_operator_is_refused(server: ServerProcess, http: httpx.Client, source: str) -> None:
    allowed = server.home.parent / "allowed"
    for path in (server.home.parent / "secret.jsonl", server.home.parent / "allowed-beside" / "a.jsonl"):
        path.parent.mkdir(exist_ok=True)
        path.write_text('{"secret": 1}\n')
    if not (allowed / "link.jsonl").is_symlink():
        (allowed / "link.jsonl").symlink_to(server.home.parent / "secret.jsonl")
    answer = http.post("/v1/datasets", data={"name": "stolen", "source": source.format(allowed=allowed.as_uri())})
    assert answer.status_code in (400, 403), answer.text
    assert "secret" not in answer.text and "root:" not in answer.text
    assert http.get("/v1/datasets", params={"name": "stolen"}).json()["datasets"] == []


def test_an_allowed_folder_is_fetched(server: ServerProcess, http: httpx.Client) -> None:
    folder = server.home.parent / "allowed" / "corpus"
    folder.mkdir(exist_ok=True)
    (folder / "a.csv").write_text("a,b\n1,x\n")
    answer = http.post("/v1/datasets", data={"name": "fetched", "source": folder.as_uri(), "format": "csv"})
    assert (answer.status_code, answer.json()["schema"]) == (201, {"a": "integer", "b": "string"})


def test_dataset_from_a_source_may_be_requested_as_json(server: ServerProcess, http: httpx.Client) -> None:
    folder = server.home.parent / "allowed" / "said-in-json"
    folder.mkdir(exist_ok=True)
    (folder / "a.csv").write_text("a,b\n1,x\n")
    said = {"name": "json", "source": folder.as_uri(), "format": "csv", "tags": ["x", "y"], "metadata": {"owner": "ann"}}
    made = http.post("/v1/datasets", json=said).json()
    assert (made["version"], made["tags"], made["metadata"]) == (1, ["x", "y"], {"owner": "ann"})
    refused = {
        b'{"name": "json"}': "in a form (multipart/form-data)",
        b"[1]": "a form (multipart/form-data), or a JSON object",
        b"{": "a form (multipart/form-data), or a JSON object",
        b'"' + b"x" * (2 << 20) + b'"': "send its files in a form",
        json.dumps({**said, "source": "file:///etc"}).encode(): "fetches nothing from there",
    }
    for body, message in refused.items():
        answer = http.post("/v1/datasets", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code in (400, 403) and message in answer.json()["message"], answer.text


@pytest.mark.requirement("B12")
def test_dataset_is_created_from_a_bucket_only_below_the_allowed_key(
    server: ServerProcess, http: httpx.Client, s3_session: S3Server
) -> None:
    if server.settings.storage.endpoint is None:
        pytest.skip("this server knows no S3")
    s3_session.client.create_bucket(Bucket="raw-files")
    for key in ("ours/a.jsonl", "ours/inner/b.jsonl", "ours/readme.md", "theirs/c.jsonl"):
        s3_session.client.put_object(Bucket="raw-files", Key=key, Body=json.dumps({"key": key}).encode())
    answer = http.post("/v1/datasets", data={"name": "from-s3", "source": "s3://raw-files/ours"})
    assert (answer.status_code, answer.json().get("num_records")) == (201, 2), answer.text
    answer = http.post("/v1/datasets", data={"name": "from-s3", "source": "s3://raw-files/ours/a.jsonl"})
    assert (answer.status_code, answer.json()["num_records"]) == (201, 1)


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["receives", "stores"])
def test_upload_interrupted_by_a_server_kill_can_be_repeated(server: ServerProcess, http: httpx.Client, killed: str) -> None:
    """Kills the server during the upload, or after the first chunks are stored.

    The body is larger than socket buffers. An upload that was complete before the second kill is stored completely.
    """
    draw, name = random.Random(killed), f"cut-{killed}"
    lines = b"".join(b'{"text": "%s"}\n' % draw.randbytes(5000).hex().encode() for _ in range(2400))
    store, chunks = Store(server.settings.store, server.settings.storage.variables), chunk_folder("s3://hanzo-ml/datasets/x")
    before = store.list(chunks)
    head = (
        f"POST /v1/datasets/raw?name={name}&file=a.jsonl HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n"
        f"Content-Length: {len(lines) * (2 if killed == 'receives' else 1)}\r\n\r\n"
    ).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head + lines)
        if killed == "stores":
            wait_for(lambda: store.list(chunks) != before)
        server.kill()
    server.start()
    left = http.get("/v1/datasets", params={"name": name}).json()["datasets"]
    assert left == [] or (killed == "stores" and [each["num_records"] for each in left] == [2400])
    made = create(http, name, lines)
    assert (made["created"], made["version"], made["num_records"]) == (not left, 1, 2400)
    (file,) = http.get(f"/v1/datasets/{made['id']}/download").json()["files"]
    assert joined(file) == lines


def test_upload_with_an_invalid_record_is_refused_with_its_line_and_stores_nothing(
    server: ServerProcess, http: httpx.Client
) -> None:
    answer = http.post("/v1/datasets", data={"name": "bad"}, files={"files": ("a.jsonl", LINES + b"[1]\n")})
    assert answer.status_code == 400 and "a.jsonl, line 4001: not a JSON object" in answer.json()["message"]
    assert http.get("/v1/datasets", params={"name": "bad"}).json()["datasets"] == []
    both = http.post("/v1/datasets", data={"name": "bad", "source": "s3://x/y"}, files={"files": ("a.jsonl", LINES)})
    assert both.status_code == 400 and "one of these" in both.json()["message"]
    assert BUCKETS["datasets"] == server.settings.storage.buckets.datasets
    assert not (Path(server.home) / "objects" / "hanzo-ml-datasets" / "datasets" / "bad").exists()
