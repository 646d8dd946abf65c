"""Artifact integrity by SHA-256, on a folder and on S3.

Incomplete uploads are not stored, and corrupt content is not served.
"""

import base64
import hashlib
import http.client
import json
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from resources.metadata.artifacts.file_hashes import UNKNOWN_HASH
from tests.api.artifact_server import ArtifactServer, on_s3
from tests.support.s3_server import S3Server
from tests.support.server_process import ServerProcess

LARGE = bytes(range(256)) * (6 << 12)
"""More than one request sends, and more than is kept in memory."""


@pytest.fixture(scope="module")
def server(server_on_either: ServerProcess) -> ArtifactServer:
    return ArtifactServer(server_on_either)


@pytest.fixture
def run_id(server: ArtifactServer) -> str:
    return server.new_run()


def uri(run_id: str, name: str) -> str:
    return f"s3://hanzo-ml/runs/{run_id}/artifacts/{name}"


@pytest.mark.parametrize("body", [b"", b"small", LARGE], ids=["empty", "small", "large"])
def test_download_returns_content_with_its_sha256(server: ArtifactServer, run_id: str, body: bytes) -> None:
    where = server.place(run_id, "a/f.bin")
    sha256 = hashlib.sha256(body).hexdigest()
    assert server.raw("PUT", where, body).headers["X-Checksum-Sha256"] == sha256
    for method, content in (("GET", body), ("HEAD", b"")):
        answer = server.raw(method, where)
        assert (answer.status, answer.body) == (200, content)
        assert answer.headers["Content-Length"] == str(len(body))
        assert answer.headers["X-Checksum-Sha256"] == sha256
    assert server.files(run_id, "a") == [{"path": "a/f.bin", "is_dir": False, "file_size": len(body)}]
    shown = httpx.get(f"{server.url}/v1/runs/{run_id}").json()["artifacts"]
    assert shown == [{"key": "a/f.bin", "path": uri(run_id, "a/f.bin"), "size": len(body)}]


@pytest.mark.parametrize(("name", "times"), [("n", (240, 241)), ("d/", (470, 495))], ids=["name", "whole key"])
def test_overlong_artifact_key_is_refused_with_400(
    server: ArtifactServer, run_id: str, name: str, times: tuple[int, int]
) -> None:
    """A 503 made clients resend it endlessly."""
    fits, too_long = ((name * count).removesuffix("/") for count in times)
    answer = server.raw("POST", f"/v1/runs/{run_id}/artifacts?key={too_long}", b"x")
    assert answer.status == 400 and "at most 240 bytes in a name, and 1024 in all" in json.loads(answer.body)["message"]
    assert server.raw("POST", f"/v1/runs/{run_id}/artifacts?key={fits}", b"x").status in (200, 201)
    assert server.raw("GET", server.place(run_id, fits)).body == b"x"


def test_upload_without_content_length_arrives_complete(server: ArtifactServer, run_id: str) -> None:
    where = server.place(run_id, "f")
    pieces = (LARGE[start : start + 100_000] for start in range(0, len(LARGE), 100_000))
    assert server.raw("PUT", where, pieces).status == 200
    assert server.raw("GET", where).body == LARGE


@pytest.mark.requirement("X7", "Y5")
@pytest.mark.parametrize("body", [b"small content", LARGE], ids=["small", "large"])
def test_corrupt_artifact_answers_409_and_emits_an_event(server: ArtifactServer, run_id: str, body: bytes) -> None:
    where, place = server.place(run_id, "f"), uri(run_id, "f")
    server.raw("PUT", where, body)
    spoiled = body[:-1] + bytes([body[-1] ^ 1])
    server.store.put_bytes(place, spoiled)
    for headers in ({}, {"Range": "bytes=0-3"}, {}):
        answer = server.raw("GET", where, headers=headers)
        assert answer.status == 409
        assert json.loads(answer.body)["error_code"] == "DATA_LOSS"
        assert "SHA-256" in json.loads(answer.body)["message"]
        assert spoiled[:4] not in answer.body
    events = [event for event in server.broken_events() if event["uri"] == place]
    assert {event["organization"] for event in events} == {"default"}, "the audit log shows an organization what is its own"
    assert [(event["expected_sha256"], event["found_sha256"]) for event in events] == [
        ([hashlib.sha256(body).hexdigest()], hashlib.sha256(spoiled).hexdigest())
    ]
    server.store.put_bytes(place, body)
    assert server.raw("GET", where).body == body


def test_corruption_is_detected_after_an_abandoned_multipart_upload(server: ArtifactServer, run_id: str) -> None:
    """The client falls back to the server when joining the parts times out."""
    where, place = server.place(run_id, "f"), uri(run_id, "f")
    server.records.begin_upload(place, UNKNOWN_HASH, 0)
    server.raw("PUT", where, b"content")
    assert server.raw("GET", where).body == b"content"
    server.store.put_bytes(place, b"contens")
    for _ in range(2):
        assert server.raw("GET", where).status == 409


def test_replaced_file_is_verified_against_its_newest_hash(server: ArtifactServer, run_id: str) -> None:
    where = server.place(run_id, "f")
    for body in (b"one", b"two", b"two", b"three"):
        assert server.raw("PUT", where, body).status == 200
        assert server.raw("GET", where).body == body
    server.store.put_bytes(uri(run_id, "f"), b"one")
    assert server.raw("GET", where).status == 409


def test_readers_never_see_a_broken_or_mixed_file_while_it_is_replaced(server: ArtifactServer, run_id: str) -> None:
    where = server.place(run_id, "f")
    bodies = [bytes([number]) * (5 << 20) for number in range(3)]
    server.raw("PUT", where, bodies[0])
    ended = threading.Event()
    seen: list[tuple[int, bytes]] = []

    def read() -> None:
        while not ended.is_set():
            try:
                answer = server.raw("GET", where)
                seen.append((answer.status, hashlib.sha256(answer.body).digest()))
            except http.client.HTTPException as error:
                seen.append((0, repr(error).encode()))

    def write(number: int) -> None:
        for body in bodies[number:] + bodies:
            assert server.raw("PUT", where, body).status == 200

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write, args=(number,)) for number in (1, 2)]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    ended.set()
    reader.join()
    whole = {hashlib.sha256(body).digest() for body in bodies}
    # 503: replaced while being read, so clients retry; a corrupt one would be a 409.
    assert [found for found in seen if found[0] != 503 and (found[0] != 200 or found[1] not in whole)] == []
    last = server.raw("GET", where)
    assert (last.status, hashlib.sha256(last.body).digest() in whole) == (200, True)
    assert not [event for event in server.broken_events() if event["uri"] == uri(run_id, "f")]


@pytest.mark.parametrize(
    ("header", "right", "wrong"),
    [
        ("X-Checksum-Sha256", hashlib.sha256(b"data").hexdigest(), hashlib.sha256(b"else").hexdigest()),
        (
            "Content-MD5",
            base64.b64encode(hashlib.md5(b"data").digest()).decode(),
            base64.b64encode(hashlib.md5(b"else").digest()).decode(),
        ),
    ],
)
def test_upload_with_a_wrong_checksum_header_is_refused(
    server: ArtifactServer, run_id: str, header: str, right: str, wrong: str
) -> None:
    where = server.place(run_id, "f")
    for value in (wrong, "nonsense", "===="):
        assert server.raw("PUT", where, b"data", {header: value}).status == 400
        assert server.files(run_id) == []
    assert server.raw("PUT", where, b"data", {header: right}).status == 200
    assert server.raw("PUT", where, b"other", {header: wrong}).status == 400
    assert server.raw("GET", where).body == b"data"


def nothing_unfinished(server: ArtifactServer) -> bool:
    """Whether uploads that were never completed are removed."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if not list((server.process.home / "objects").glob("*/runs/*/artifacts/**/*#*")):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("sent", [1000, 7 << 20], ids=["early", "late"])
def test_a_broken_off_upload_leaves_nothing(server: ArtifactServer, run_id: str, sent: int) -> None:
    server.raw("PUT", server.place(run_id, "old"), b"old")
    for name in ("old", "new"):
        connection = http.client.HTTPConnection("127.0.0.1", server.process.port)
        connection.putrequest("PUT", server.place(run_id, name))
        connection.putheader("Content-Length", str(20 << 20))
        connection.endheaders()
        connection.send(b"x" * sent)
        connection.sock.shutdown(socket.SHUT_WR)
        with suppress(ConnectionError):
            connection.sock.recv(1000)  # returns when the server has noticed
        connection.close()
    assert nothing_unfinished(server)
    assert server.files(run_id) == [{"path": "old", "is_dir": False, "file_size": 3}]
    assert server.raw("GET", server.place(run_id, "old")).body == b"old"


@pytest.mark.parametrize(
    ("header", "status", "part", "content_range"),
    [
        ("bytes=0-0", 206, slice(0, 1), "bytes 0-0/1000"),
        ("bytes=10-19", 206, slice(10, 20), "bytes 10-19/1000"),
        ("bytes=990-5000", 206, slice(990, 1000), "bytes 990-999/1000"),
        ("bytes=990-", 206, slice(990, 1000), "bytes 990-999/1000"),
        ("bytes=-10", 206, slice(990, 1000), "bytes 990-999/1000"),
        ("bytes=-5000", 206, slice(0, 1000), "bytes 0-999/1000"),
        ("bytes=1000-", 416, slice(0, 0), "bytes */1000"),
        ("bytes=-0", 416, slice(0, 0), "bytes */1000"),
        ("bytes=5-2", 200, slice(0, 1000), None),
        ("bytes=0-1,5-6", 200, slice(0, 1000), None),
        ("lines=1-2", 200, slice(0, 1000), None),
        ("bytes=-", 200, slice(0, 1000), None),
        ("bytes=\xb2-", 200, slice(0, 1000), None),
    ],
)
def test_range_request_returns_the_requested_bytes(
    server: ArtifactServer, run_id: str, header: str, status: int, part: slice, content_range: str | None
) -> None:
    where, body = server.place(run_id, "f"), os.urandom(1000)
    server.raw("PUT", where, body)
    answer = server.raw("GET", where, headers={"Range": header})
    assert (answer.status, answer.body) == (status, body[part])
    assert answer.headers["Content-Range"] == content_range


def test_if_range_request_returns_the_whole_file_after_a_change(server: ArtifactServer, run_id: str) -> None:
    where = server.place(run_id, "f")
    server.raw("PUT", where, LARGE)
    etag = server.raw("HEAD", where).headers["ETag"]
    middle = {"Range": "bytes=5000000-5000009", "If-Range": etag}
    assert server.raw("GET", where, headers=middle).body == LARGE[5000000:5000010]
    server.raw("PUT", where, b"new")
    assert server.raw("GET", where, headers=middle).body == b"new"


def test_published_file_is_verified_against_its_manifest(server: ArtifactServer, run_id: str, tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"weights")
    server.store.publish(tmp_path, uri(run_id, "model"), "checkpoint")
    where = server.place(run_id, "model/model.bin")
    assert server.raw("GET", where).body == b"weights"
    server.store.put_bytes(uri(run_id, "model/model.bin"), b"weightz")
    assert server.raw("GET", where).status == 409
    assert [event["uri"] for event in server.broken_events()].count(uri(run_id, "model/model.bin")) == 1


@pytest.mark.slow
def test_server_killed_during_upload_leaves_nothing(server: ArtifactServer, run_id: str) -> None:
    server.raw("PUT", server.place(run_id, "f"), b"old")
    connection = http.client.HTTPConnection("127.0.0.1", server.process.port)
    connection.putrequest("PUT", server.place(run_id, "f"))
    connection.putheader("Content-Length", str(20 << 20))
    connection.endheaders()
    connection.send(b"x" * (12 << 20))
    server.process.kill()
    connection.close()
    left = list(server.process.home.rglob("*#*"))
    for path in left:
        os.utime(path, (time.time() - 90_000, time.time() - 90_000))
    server.process.start()
    assert server.raw("GET", server.place(run_id, "f")).body == b"old"
    assert server.files(run_id) == [{"path": "f", "is_dir": False, "file_size": 3}]
    assert nothing_unfinished(server)


def memory(process_id: int) -> int:
    lines = Path(f"/proc/{process_id}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


@pytest.mark.slow
def test_the_memory_of_a_server_does_not_grow_with_a_file(server: ArtifactServer, run_id: str) -> None:
    # The S3 server of the tests keeps files in memory, several times over.
    size = 1 << 30 if server.process.settings.storage.endpoint is None else 150 << 20
    where = server.place(run_id, "large")
    server.raw("PUT", where, LARGE)  # memory that libraries allocate once
    server.raw("GET", where)
    process_id = server.process.process_id
    before, peak, ended = memory(process_id), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.02):
            peak = max(peak, memory(process_id))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        pieces = (LARGE[: 1 << 20] for _ in range(size >> 20))
        assert server.raw("PUT", where, pieces, {"Content-Length": str(size)}).status == 200
        received = 0
        with httpx.stream("GET", f"{server.url}{where}", timeout=60) as answer:
            for chunk in answer.iter_raw():
                received += len(chunk)
    finally:
        ended.set()
        watcher.join()
    server.raw("DELETE", where)
    assert received == size
    assert 0 < peak - before < 40 << 20


LIMITED = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, 3 << 20))
sys.argv = ["api.server"]
runpy.run_module("api.server", run_name="__main__")
"""


class SmallDisk(ServerProcess):
    """Limit files to 3 MB, as a full disk does."""

    command = (sys.executable, "-c", LIMITED)


@pytest.mark.slow
def test_full_disk_answers_507_and_leaves_nothing(tmp_path: Path) -> None:
    with SmallDisk(tmp_path) as process:
        server = ArtifactServer(process)
        run_id = server.new_run()
        answer = server.raw("PUT", server.place(run_id, "f"), LARGE)
        assert answer.status == 507
        assert json.loads(answer.body)["error_code"] == "RESOURCE_EXHAUSTED"
        assert str(tmp_path) not in answer.body.decode()
        assert server.files(run_id) == []
        assert not list(tmp_path.rglob("*#*"))
        assert server.raw("PUT", server.place(run_id, "f"), b"small").status == 200


class Unready(ServerProcess):
    """A server whose store does not respond, so it is never ready."""

    ready = "/alive"


@pytest.mark.slow
def test_store_failure_answers_503_without_internal_names(tmp_path: Path, s3_session: S3Server) -> None:
    with Unready(tmp_path, {**on_s3(s3_session), "HANZO_ML_STORAGE_BUCKETS_CHECKPOINTS": "no-such-bucket"}) as process:
        server = ArtifactServer(process)
        answer = server.raw("PUT", server.place(server.new_run(), "f"), b"x")
        assert answer.status == 503
        assert "no-such-bucket" not in answer.body.decode()


def test_configured_credentials_and_encryption_reach_the_object_store(
    server: ArtifactServer, run_id: str, s3_session: S3Server
) -> None:
    s3_session.requests.clear()
    server.raw("PUT", server.place(run_id, "f"), LARGE)
    puts = [request for request in s3_session.requests if request.method in ("PUT", "POST")]
    if server.process.settings.storage.endpoint is None:
        assert not s3_session.requests
        return
    assert puts and all("Credential=the-access-key/" in request.headers["authorization"] for request in puts)
    beginnings = [request for request in puts if "uploadId" not in request.query]
    assert {request.headers.get("x-amz-server-side-encryption") for request in beginnings} == {"AES256"}
