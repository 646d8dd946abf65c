"""Objects of a program: with its token, pods reach what the job names.

Runs on a folder and on S3.
"""

import hashlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import httpx
import pytest
import urllib3
from starlette.requests import Request

from api.routes.v1.job_objects import get_content
from recipes.contracts.job import Job, Program, StoreAddress
from recipes.storage import uris
from recipes.storage.artifact_store import MANIFEST_FILE, Store
from recipes.storage.buckets import UNFINISHED_UPLOAD, StoreRefuses, StoreUnavailable
from recipes.storage.line_selection import bitmap_uri, origin_uri
from recipes.storage.locations import chunk_uri
from recipes.storage.manifest import Chunk, FileRecord, LineSelection, Manifest
from recipes.storage.object_transfer import RANGE_BYTES, StoredObject
from resources.jobs.program_tokens import ClusterCredentials, ProgramGrant
from resources.metadata.database import Database
from resources.object_store.program_scope import ProgramScopes
from tests.resources.cluster_rows import claim_attempt
from tests.support.s3_server import S3Server
from tests.support.server_process import ServerProcess
from tests.support.signed_store import objects_address, program_job, store_in_pod, submit

OUTPUT = "s3://hanzo-models/m/made"


class Pod:
    """A submitted program: its store, and plain requests with its token."""

    def __init__(self, server: ServerProcess, job: Job, attempt: int = 0) -> None:
        self.server, self.job = server, job
        self.token = submit(server, job)
        self.store = self.at(attempt)
        self.direct = Store(server.settings.store, server.settings.storage.variables)
        self.address = objects_address(server, job)

    def at(self, attempt: int) -> Store:
        return store_in_pod(self.server, self.job, self.token, attempt)

    def post(self, route: str, **body: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.token}"}
        return httpx.post(f"{self.address}/{route}", json=body, headers=headers, trust_env=False, timeout=60)

    def claim(self, attempt: int) -> None:
        database = Database(self.server.settings.database_url)
        claim_attempt(database, self.job, attempt)
        database.close()


@pytest.fixture
def pod(server_on_either: ServerProcess) -> Iterator[Pod]:
    made = Pod(server_on_either, program_job(server_on_either, {"merged": OUTPUT}))
    yield made
    made.direct.delete(OUTPUT)


def refused(pod: Pod, uri: str) -> list[str]:
    """Return which operations on an object are refused for lack of permission."""
    done = {
        "read": lambda: pod.store.get_bytes(uri),
        "list": lambda: pod.store.list(uri),
        "write": lambda: pod.store.put_bytes(uri, b"x"),
        "upload": lambda: pod.store.put_bytes(uri, bytes(2 << 20)),
        "delete": lambda: pod.store.remove(uri),
    }
    found = []
    for name, ends in {"copy from": (uri, f"{OUTPUT}/copy"), "copy to": (f"{OUTPUT}/a", uri)}.items():
        if pod.post("copy", source=ends[0], uri=ends[1]).status_code == 403:
            found.append(name)
    for name, operation in done.items():
        try:
            operation()
        except StoreRefuses as error:
            assert "403" in str(error)
            found.append(name)
        except (FileNotFoundError, StoreUnavailable):
            pass
    return found


EVERYTHING = ["copy from", "copy to", "read", "list", "write", "upload", "delete"]


def test_program_publishes_and_fetches_artifact_through_the_api(pod: Pod, tmp_path: Path) -> None:
    data = random.Random(0).randbytes(2 * RANGE_BYTES + 5)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "weights.safetensors").write_bytes(data)
    (tmp_path / "out" / "config.json").write_bytes(b"{}")
    made = pod.store.publish(tmp_path / "out", OUTPUT, "merged")
    assert pod.direct.find(OUTPUT) == made
    found = pod.store.fetch(made, tmp_path / "cache")
    assert (found / "weights.safetensors").read_bytes() == data


@pytest.mark.parametrize(
    "uri",
    [
        "s3://hanzo-ml/checkpoints/another-run/100/model.safetensors",
        "s3://hanzo-ml/runs/another-run/train.json",
        "s3://hanzo-ml/datasets/@rival/d/1/records.jsonl",
        "s3://hanzo-ml/datasets/d/1/records.jsonl",
        "s3://hanzo-ml/jobs/another-job/convert/000001/exit.json",
        "s3://hanzo-ml/artifacts/@default/file",
        "s3://hanzo-models/another/1/model.gguf",
        "s3://hanzo-models/m/made-by-others/x",
        "s3://hanzo-models/m",
        "s3://hanzo-models/base",
    ],
)
def test_object_of_others_is_refused(pod: Pod, uri: str) -> None:
    pod.store.put_bytes(f"{OUTPUT}/a", b"mine")
    assert refused(pod, uri) == EVERYTHING


@pytest.mark.parametrize(
    "uri",
    [
        f"{OUTPUT}/../others/x",
        f"{OUTPUT}/./x",
        f"{OUTPUT}//x",
        "s3://hanzo-ml/../../metadata.db",
        "file:///etc/passwd",
        "s3://hanzo-ml-checkpoints/runs/r/x",
        f"{OUTPUT}/a\n",
    ],
)
def test_uri_that_leaves_the_store_is_refused(pod: Pod, uri: str) -> None:
    for route, body in {
        "head": {"uris": [uri]},
        "list": {"uri": uri},
        "delete": {"uris": [uri]},
        "addresses": {"reads": [uri]},
        "uploads": {"uri": uri},
    }.items():
        answer = pod.post(route, **body)
        assert answer.status_code in (400, 403), (route, answer.text)


def test_double_slash_in_uri_does_not_bypass_the_scope_check(pod: Pod) -> None:
    answer = pod.post("head", uris=["s3://hanzo-ml//runs/another-run/train.json"])
    assert answer.status_code in (400, 403), answer.text


def test_input_is_read_only(server_on_either: ServerProcess, tmp_path: Path) -> None:
    direct = Store(server_on_either.settings.store, server_on_either.settings.storage.variables)
    (tmp_path / "records.jsonl").write_bytes(b"{}\n")
    source = "s3://hanzo-ml/datasets/read-only/1"
    artifact = direct.publish(tmp_path, source, "dataset")
    pod = Pod(server_on_either, program_job(server_on_either, {"merged": OUTPUT}, {"dataset": artifact}))
    assert pod.store.get_bytes(f"{source}/records.jsonl") == b"{}\n"
    assert refused(pod, f"{source}/records.jsonl") == ["copy to", "write", "upload", "delete"]


def chunked_dataset(store: Store, folder: str, name: str) -> tuple[Any, bytes]:
    """Create a dataset in one chunk, and return its bytes."""
    data = b'{"a": 1}\n{"a": 2}\n' + name.encode()
    sha256 = hashlib.sha256(data).hexdigest()
    uri = f"{folder}/{name}/1"
    store.put_bytes(chunk_uri(uri, sha256), data)
    file = FileRecord(path="a.jsonl", sha256=sha256, size=len(data), chunks=(Chunk(sha256=sha256, size=len(data)),))
    return store.put_manifest(uri, Manifest(kind="dataset", files=(file,))), data


def split_of(store: Store, dataset: Any, uri: str, origin: str | None = None) -> Any:
    """Create an artifact of the first line of a dataset."""
    bitmap = bytes([0b10000000])
    selection = LineSelection(
        of=dataset.digest, path="a.jsonl", before=0, records=2, chosen=1, sha256=hashlib.sha256(bitmap).hexdigest()
    )
    line = b'{"a": 1}\n'
    file = FileRecord(path="s.jsonl", sha256=hashlib.sha256(line).hexdigest(), size=len(line), selection=selection)
    store.put_bytes(bitmap_uri(uri, "s.jsonl"), bitmap)
    store.put_bytes(origin_uri(uri), (origin or dataset.uri).encode())
    return store.put_manifest(uri, Manifest(kind="split", files=(file,)))


def test_split_is_read_with_the_lines_and_chunks_that_it_selects(server_on_either: ServerProcess, tmp_path: Path) -> None:
    direct = Store(server_on_either.settings.store, server_on_either.settings.storage.variables)
    dataset, _ = chunked_dataset(direct, "s3://hanzo-ml/datasets", "selected")
    split = split_of(direct, dataset, "s3://hanzo-ml/datasets/selected/1/splits/train")
    pod = Pod(server_on_either, program_job(server_on_either, {"merged": OUTPUT}, {"train": split}))
    assert (pod.store.fetch(split, tmp_path) / "s.jsonl").read_bytes() == b'{"a": 1}\n'
    assert "list" in refused(pod, "s3://hanzo-ml/datasets/_chunks"), "hashes of other datasets are not listed"


def test_split_naming_another_organizations_dataset_gives_no_access_to_it(server_on_either: ServerProcess) -> None:
    direct = Store(server_on_either.settings.store, server_on_either.settings.storage.variables)
    dataset, data = chunked_dataset(direct, "s3://hanzo-ml/datasets/@rival", "secret")
    split = split_of(direct, dataset, "s3://hanzo-ml/datasets/forged/1/splits/train")
    pod = Pod(server_on_either, program_job(server_on_either, {"merged": OUTPUT}, {"train": split}))
    for uri in (f"{dataset.uri}/{MANIFEST_FILE}", chunk_uri(dataset.uri, hashlib.sha256(data).hexdigest())):
        with pytest.raises(StoreRefuses, match="neither an input nor an output"):
            pod.store.get_bytes(uri)


def test_training_writes_checkpoints_but_no_record(server_on_either: ServerProcess) -> None:
    job = program_job(server_on_either, {}, program=Program.TRAIN)
    checkpoints = uris.run_checkpoints(job.id)
    pod = Pod(server_on_either, job.model_copy(update={"outputs": {"checkpoints": checkpoints}}))
    folder = uris.run_folder(job.id)
    for uri in (f"{checkpoints}/5/manifest.json", job.result_uri):
        pod.store.put_bytes(uri, b"{}")
        assert pod.store.get_bytes(uri) == b"{}"
    with pytest.raises(StoreRefuses, match="not an output of this job"):
        pod.store.put_bytes(f"{folder}/record/manifest.json", b"{}")


def test_manifest_result_and_exit_document_get_no_signed_url(pod: Pod) -> None:
    logs = uris.attempt_folder(pod.job.id, pod.job.program, 0)
    sha256 = "0" * 64
    committed = [f"{OUTPUT}/{MANIFEST_FILE}", pod.job.result_uri, f"{logs}/exit.json"]
    wanted = [{"uri": uri, "sha256": sha256} for uri in (*committed, f"{OUTPUT}/weights")]
    answer = pod.post("addresses", writes=wanted).json()
    assert [address is None for address in answer["writes"]] == [True, True, True, False]
    assert all(pod.post("uploads", uri=uri).json()["upload_id"] is None for uri in committed)


def test_older_attempt_changes_nothing_but_its_own_logs(pod: Pod, tmp_path: Path) -> None:
    old, new = pod.at(1), pod.at(2)
    pod.claim(1)
    old.put_bytes(f"{OUTPUT}/{MANIFEST_FILE}", b"first")
    pod.claim(2)
    (tmp_path / "large").write_bytes(bytes(RANGE_BYTES + 1))
    logs = [uris.attempt_folder(pod.job.id, pod.job.program, attempt) for attempt in (1, 2)]
    for change in (
        lambda: old.put_bytes(f"{OUTPUT}/{MANIFEST_FILE}", b"late"),
        lambda: old.put_bytes(f"{OUTPUT}/part", bytes(2 << 20)),
        lambda: old.put_file(f"{OUTPUT}/large", tmp_path / "large"),
        lambda: old.put_bytes(pod.job.result_uri, b"late"),
        lambda: old.put_bytes(f"{logs[0]}/exit.json", b"late"),
        lambda: old.remove(f"{OUTPUT}/{MANIFEST_FILE}"),
        lambda: old.copy(f"{OUTPUT}/{MANIFEST_FILE}", f"{OUTPUT}/copy"),
    ):
        with pytest.raises(StoreRefuses, match="409: attempt 1 of convert is over: attempt 2 has begun"):
            change()
    old.put_bytes(f"{logs[0]}/logs/node-0/000009.log", b"its last words")
    for late in (old, new):
        with pytest.raises(StoreRefuses, match="does not belong to attempt"):
            late.put_bytes(f"{logs[1 if late is old else 0]}/logs/node-0/000001.log", b"forged")
    assert pod.direct.list(OUTPUT) == [f"{OUTPUT}/{MANIFEST_FILE}"]
    assert new.get_bytes(f"{OUTPUT}/{MANIFEST_FILE}") == b"first"
    new.put_bytes(f"{OUTPUT}/{MANIFEST_FILE}", b"second")
    assert pod.direct.get_bytes(f"{OUTPUT}/{MANIFEST_FILE}") == b"second"


def test_upload_begun_by_an_older_attempt_is_not_completed(pod: Pod) -> None:
    pod.claim(1)
    headers = {"Authorization": f"Bearer {pod.token}", "Hanzo-ML-Attempt": "1"}

    def ask(route: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{pod.address}/{route}", json=body, headers=headers, trust_env=False)

    upload_id = ask("uploads", uri=f"{OUTPUT}/x").json()["upload_id"]
    if upload_id is None:
        pytest.skip("a folder has no uploads in parts")
    data = b"x" * (5 << 20)
    sha256 = hashlib.sha256(data).hexdigest()
    [part] = ask("uploads/parts", uri=f"{OUTPUT}/x", upload_id=upload_id, parts=[{"number": 1, "sha256": sha256}]).json()[
        "parts"
    ]
    etag = urllib3.request("PUT", part["url"], body=data, headers=part["headers"]).headers["ETag"]
    pod.claim(2)
    parts = [{"number": 1, "etag": etag, "sha256": sha256}]
    answer = ask("uploads/complete", uri=f"{OUTPUT}/x", upload_id=upload_id, parts=parts)
    assert answer.status_code == 409 and pod.direct.list(OUTPUT) == []


def test_signed_url_accepts_only_bytes_of_the_announced_hash(pod: Pod) -> None:
    data = b"the weights"
    sha256 = hashlib.sha256(data).hexdigest()
    [address] = pod.post("addresses", writes=[{"uri": f"{OUTPUT}/w", "sha256": sha256}]).json()["writes"]
    url = address["url"] if "://" in address["url"] else f"{pod.address}/{address['url']}"
    headers = {**address["headers"], **({} if "://" in address["url"] else {"Authorization": f"Bearer {pod.token}"})}
    answer = urllib3.request("PUT", url, body=b"other bytes", headers=headers)
    assert answer.status >= 400 and pod.direct.list(OUTPUT) == []
    assert urllib3.request("PUT", url, body=data, headers=headers).status == 200
    assert pod.direct.get_bytes(f"{OUTPUT}/w") == data


def test_shared_base_model_is_created_once(server_on_either: ServerProcess) -> None:
    sha256 = hashlib.sha256(os.urandom(8)).hexdigest()
    recipe = {"recipe": {"base_model": {"uri": "pypi://m", "sha256": sha256}}}
    pod = Pod(server_on_either, program_job(server_on_either, {"merged": OUTPUT}, parameters=recipe))
    base = uris.base_model(sha256)
    pod.store.put_bytes(f"{base}/model.safetensors", b"weights")
    pod.store.put_bytes(f"{base}/{MANIFEST_FILE}", b"{}")
    for name in ("model.safetensors", MANIFEST_FILE):
        with pytest.raises(StoreRefuses, match="shared by jobs"):
            pod.store.put_bytes(f"{base}/{name}", b"others")
    other = uris.base_model("f" * 64)
    with pytest.raises(StoreRefuses, match="not an output of this job"):
        pod.store.put_bytes(f"{other}/{MANIFEST_FILE}", b"{}")
    assert pod.store.find(other) is None, "base models are read by their hash"


def test_token_opens_its_own_program_only(pod: Pod, server_on_either: ServerProcess) -> None:
    other = Pod(server_on_either, program_job(server_on_either, {"merged": OUTPUT}))
    body = {"uris": [f"{OUTPUT}/x"]}
    for token, status in ((other.token, 403), ("hanzo-ml-job-unknown", 401), ("", 401)):
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        answer = httpx.post(f"{pod.address}/head", json=body, headers=headers, trust_env=False)
        assert answer.status_code == status, answer.text
    forged = pod.address.replace(pod.job.id, other.job.id)
    answer = httpx.post(f"{forged}/head", json=body, headers={"Authorization": f"Bearer {pod.token}"}, trust_env=False)
    assert answer.status_code == 403 and "belongs to convert of job" in answer.json()["message"]


def call_all(pod: Pod, token: str) -> dict[str, int]:
    """Return the status of every operation on a program's object with this token."""
    uri, headers = f"{OUTPUT}/kept", {"Authorization": f"Bearer {token}"}
    sha256 = hashlib.sha256(b"changed").hexdigest()
    bodies: dict[str, Any] = {
        "addresses": {"reads": [uri], "writes": [{"uri": uri, "sha256": sha256}]},
        "head": {"uris": [uri]},
        "list": {"uri": OUTPUT, "recursive": True},
        "delete": {"uris": [uri]},
        "copy": {"source": uri, "uri": f"{OUTPUT}/copy"},
        "uploads": {"uri": uri},
    }
    with httpx.Client(headers=headers, trust_env=False, timeout=60) as client:
        found = {name: client.post(f"{pod.address}/{name}", json=body).status_code for name, body in bodies.items()}
        query = {"uri": uri, "sha256": sha256}
        found["put content"] = client.put(f"{pod.address}/content", params=query, content=b"changed").status_code
        found["get content"] = client.get(f"{pod.address}/content", params={"uri": uri}).status_code
    return found


def test_token_of_a_finished_program_is_rejected(pod: Pod, server_on_either: ServerProcess) -> None:
    pod.direct.put_bytes(f"{OUTPUT}/kept", b"kept")
    database = Database(server_on_either.settings.database_url)
    ClusterCredentials(database).revoke(pod.job)
    database.close()
    assert set(call_all(pod, pod.token).values()) == {401}
    assert set(call_all(pod, "somebody's own token").values()) == {401}
    assert pod.direct.list(OUTPUT) == [f"{OUTPUT}/kept"] and pod.direct.get_bytes(f"{OUTPUT}/kept") == b"kept"


def test_cached_token_is_rejected_soon_after_its_program_finished(pod: Pod, server_on_either: ServerProcess) -> None:
    assert pod.post("list", uri=OUTPUT).status_code == 200
    database = Database(server_on_either.settings.database_url)
    ClusterCredentials(database).revoke(pod.job)
    database.close()
    deadline = time.monotonic() + 30
    while pod.post("list", uri=OUTPUT).status_code != 401:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_program_without_token_is_refused_before_any_request(server_on_either: ServerProcess) -> None:
    job = program_job(server_on_either, {"merged": OUTPUT})
    with pytest.raises(StoreRefuses, match="MLFLOW_TRACKING_TOKEN"):
        store_in_pod(server_on_either, job, "").get_bytes(f"{OUTPUT}/x")


UPLOAD = """
import sys
from pathlib import Path
from recipes.contracts.job import StoreAddress
from recipes.storage.artifact_store import Store

Store(StoreAddress.model_validate_json(sys.argv[1])).put_file(sys.argv[2], Path(sys.argv[3]), 1)
"""


def test_killed_upload_leaves_nothing_visible(pod: Pod, tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 30)
    code = [sys.executable, "-c", UPLOAD, pod.store.address.model_dump_json(), f"{OUTPUT}/large", str(tmp_path / "large")]
    uploader = subprocess.Popen(code, env={**os.environ, "MLFLOW_TRACKING_TOKEN": pod.token})
    try:
        deadline = time.monotonic() + 60
        while not has_unfinished_upload(pod):
            assert uploader.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        uploader.kill()
        uploader.wait()
    assert pod.direct.list(OUTPUT) == [] and not pod.direct.exists(f"{OUTPUT}/large")


def has_unfinished_upload(pod: Pod) -> bool:
    folder = pod.direct.local_path(OUTPUT)
    if folder is not None:
        return any(UNFINISHED_UPLOAD.fullmatch(path.name) for path in folder.glob("*"))
    storage = pod.server.settings.storage
    client = boto3.client(
        "s3",
        endpoint_url=pod.direct.address.root,
        aws_access_key_id=storage.variables["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=storage.variables["AWS_SECRET_ACCESS_KEY"],
        region_name="us-east-1",
    )
    return bool(client.list_multipart_uploads(Bucket=pod.direct.address.buckets["models"]).get("Uploads"))


def test_wrong_storage_credentials_of_the_server_fail_pods_immediately_naming_the_settings(
    server_on_s3: ServerProcess, s3: S3Server
) -> None:
    pod = Pod(server_on_s3, program_job(server_on_s3, {"merged": OUTPUT}))
    s3.refusing = 1000
    try:
        with pytest.raises(StoreRefuses, match=r"storage\.access_key and storage\.secret_key"):
            pod.store.put_bytes(f"{OUTPUT}/small", b"x")
        with pytest.raises(StoreRefuses, match=r"storage\.access_key, storage\.secret_key of the API"):
            pod.store.put_bytes(f"{OUTPUT}/large", bytes(2 << 20))
    finally:
        s3.refusing = 0


class ReplacingStore(Store):
    """Replaces an object as soon as it was opened."""

    def open(self, uri: str) -> StoredObject:
        found = super().open(uri)
        self.put_bytes(uri, b"another one")
        return found


def test_object_replaced_while_being_read_answers_412(tmp_path: Path) -> None:
    store = ReplacingStore(StoreAddress(root=tmp_path.as_uri(), buckets={"models": "m"}))
    store.put_bytes(f"{OUTPUT}/a", b"the first one")
    job = Job(
        id="j",
        program=Program.CONVERT,
        outputs={"merged": OUTPUT},
        result_uri="s3://hanzo-ml/runs/j/convert.json",
        store=store.address,
        cache_dir="/cache",
    )
    request = Request({"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": []})
    grant = ProgramGrant(job.id, job.program, "default", "", job, 1, "run")
    answer = get_content(request, grant, store, ProgramScopes(store), f"{OUTPUT}/a")
    assert answer.status_code == 412 and "was replaced while it was read" in bytes(answer.body).decode()
