"""Objects behind the API during failures: restarts, refused URLs, broken connections, corrupt bytes."""

import json
import random
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from recipes.contracts.job import StoreAddress
from recipes.storage import object_api
from recipes.storage.artifact_store import Store
from recipes.storage.buckets import StoreRefuses, StoreUnavailable
from recipes.storage.object_transfer import RANGE_BYTES
from recipes.storage.signed_bucket import TOKEN_VARIABLE
from tests.support.s3_server import BUCKETS, S3Server
from tests.support.server_process import ServerProcess
from tests.support.signed_store import program_job, store_in_pod, submit

PLACE = "s3://hanzo-models/m/made"
LARGE = random.Random(1).randbytes(3 * RANGE_BYTES + 7)


@pytest.fixture
def store(s3: S3Server, server_of_pods: ServerProcess) -> Store:
    job = program_job(server_of_pods, {"merged": PLACE})
    return store_in_pod(server_of_pods, job, submit(server_of_pods, job))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "large"
    path.write_bytes(LARGE)
    return path


def test_large_file_travels_in_parts_and_ranges_past_the_api(store: Store, s3: S3Server, file: Path) -> None:
    store.put_file(f"{PLACE}/x", file)
    parts = [request for request in s3.requests if request.method == "PUT" and "partNumber" in request.query]
    assert len(parts) == 4 and all("x-amz-checksum-sha256" in request.headers for request in parts)
    assert all("X-Amz-Signature" in request.query for request in parts), "the program has no key to sign with"
    s3.requests.clear()
    assert b"".join(store.open(f"{PLACE}/x").prefetch_ranges()) == LARGE
    ranges = [request.headers["range"] for request in s3.requests if "X-Amz-Signature" in request.query]
    assert len(ranges) == 4


def test_bytes_that_changed_on_the_way_are_sent_again(store: Store, s3: S3Server, file: Path) -> None:
    s3.breaking = 2
    store.put_file(f"{PLACE}/x", file)
    s3.breaking = 1
    store.put_bytes(f"{PLACE}/y", LARGE[: 2 << 20])
    assert store.get_bytes(f"{PLACE}/x") == LARGE and store.get_bytes(f"{PLACE}/y") == LARGE[: 2 << 20]


def test_refused_signed_address_is_requested_again_once(store: Store, s3: S3Server, file: Path) -> None:
    s3.refusing = 1
    store.put_file(f"{PLACE}/x", file)
    assert store.get_bytes(f"{PLACE}/x") == LARGE
    s3.refusing = 1000
    with pytest.raises(StoreRefuses, match="refuses the signed address"):
        store.put_file(f"{PLACE}/y", file)
    s3.refusing = 0
    assert store.list(PLACE) == [f"{PLACE}/x"]
    assert not s3.client.list_multipart_uploads(Bucket="hanzo-models").get("Uploads"), "the parts are given up"


def test_upload_survives_a_restart_of_the_api(store: Store, server_of_pods: ServerProcess, file: Path) -> None:
    server_of_pods.kill()
    restart = threading.Timer(1.0, server_of_pods.start)
    restart.start()
    store.put_file(f"{PLACE}/x", file)
    store.put_bytes(f"{PLACE}/manifest.json", b"{}")
    restart.join()
    server_of_pods.kill()
    restart = threading.Timer(0.5, server_of_pods.start)
    restart.start()
    assert store.get_bytes(f"{PLACE}/x") == LARGE
    restart.join()


def test_api_that_stays_away_is_an_unavailable_store(
    store: Store, server_of_pods: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_api, "OUTAGE_SECONDS", 0.5)
    server_of_pods.kill()
    try:
        with pytest.raises(StoreUnavailable, match="does not answer"):
            store.get_bytes(f"{PLACE}/x")
    finally:
        server_of_pods.start()


class UnreliableServer:
    """API and store for one object whose connections break after some bytes of a range."""

    def __init__(self, data: bytes, break_after: int) -> None:
        self.data, self.break_after, self.version = data, break_after, '"1"'
        self.ranges: list[str] = []
        unreliable = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                address = {"url": f"{unreliable.url}/object", "headers": {}, "expires_in": 3600}
                head = {"uri": "", "size": len(data), "version": '"1"', "modified_ms": 0, "address": address}
                body = json.dumps({"objects": [head], "reads": [address]}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self) -> None:
                unreliable.ranges.append(self.headers["Range"])
                if self.headers.get("If-Match") != unreliable.version:
                    self.send_response(412)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                start, stop = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
                body = data[start : stop + 1]
                self.send_response(206)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body[: unreliable.break_after])
                self.close_connection = True

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def unreliable() -> Iterator[UnreliableServer]:
    server = UnreliableServer(LARGE[: 5 << 20], 2 << 20)
    yield server
    server.close()


@pytest.fixture
def behind(unreliable: UnreliableServer) -> Store:
    return Store(StoreAddress(root=f"api+{unreliable.url}/objects", buckets=BUCKETS), {TOKEN_VARIABLE: "t"})


def test_broken_connection_continues_where_it_broke(unreliable: UnreliableServer, behind: Store) -> None:
    assert behind.get_bytes(f"{PLACE}/x") == unreliable.data
    assert len(unreliable.ranges) == 3


def test_connection_without_progress_is_an_outage(unreliable: UnreliableServer, behind: Store) -> None:
    unreliable.break_after = 0
    with pytest.raises(StoreUnavailable, match="the connection broke"):
        behind.get_bytes(f"{PLACE}/x")


def test_object_replaced_while_it_is_read_is_not_mixed(unreliable: UnreliableServer, behind: Store) -> None:
    chunks = behind.open(f"{PLACE}/x").chunks()
    next(chunks)
    unreliable.version = '"2"'
    with pytest.raises(FileNotFoundError, match="replaced"):
        list(chunks)


def test_reader_that_stops_early_does_not_disturb_the_next_one(store: Store, file: Path) -> None:
    store.put_file(f"{PLACE}/x", file)
    for _ in range(3):
        chunks = store.open(f"{PLACE}/x").chunks()
        next(chunks)
        chunks.close()  # type: ignore[attr-defined]
    assert store.get_bytes(f"{PLACE}/x") == LARGE


def test_many_threads_share_one_store(store: Store, file: Path) -> None:
    store.put_file(f"{PLACE}/x", file)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(store.sha256(f"{PLACE}/x"))) for _ in range(16)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 120
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert len(found) == 16 and len(set(found)) == 1
