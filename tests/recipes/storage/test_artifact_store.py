"""The artifact store on a folder and on S3.

Published artifacts are read back verified, incomplete ones do not exist, and names are never interpreted as paths.
"""

import asyncio
import hashlib
import os
import pickle
import random
import resource
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import boto3
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recipes.abandoned_uploads import remove_abandoned_uploads
from recipes.contracts.job import StoreAddress
from recipes.storage import artifact_store as stores
from recipes.storage import object_transfer
from recipes.storage.artifact_store import MANIFEST_FILE, BrokenArtifact, Store, describe_files
from recipes.storage.artifact_store import hash_file as sha256_of
from recipes.storage.buckets import StoreFull, StoreRefuses, StoreUnavailable
from recipes.storage.manifest import Artifact, FileRecord, Manifest
from recipes.storage.object_store import ObjectEntry
from recipes.storage.signed_bucket import TOKEN_VARIABLE
from tests.support.s3_server import VARIABLES, S3Server
from tests.support.server_process import ServerProcess
from tests.support.signed_store import program_job, store_in_pod, submit

ROOT = Path(__file__).resolve().parents[3]
BUCKETS = {"datasets": "hanzo-ml-datasets", "checkpoints": "hanzo-ml-checkpoints", "models": "hanzo-models"}
URI = "s3://hanzo-ml/datasets/d/1/records"
PLACES = [
    *(f"s3://hanzo-ml/{kind}" for kind in ("datasets", "checkpoints", "runs")),
    *(f"s3://hanzo-models/{name}" for name in ("m", "mm", "names")),
]


@pytest.fixture(params=["folder", "s3", "pod"])
def store(request: pytest.FixtureRequest) -> Store:
    return request.getfixturevalue(f"in_{request.param}")


@pytest.fixture
def in_folder(tmp_path: Path) -> Store:
    return Store(StoreAddress(root=(tmp_path / "the objects").as_uri(), buckets=BUCKETS))


@pytest.fixture
def in_s3(s3: S3Server) -> Store:
    return Store(s3.address, VARIABLES)


@pytest.fixture
def in_pod(s3: S3Server, server_of_pods: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Return the same S3 behind the API, for a program allowed to write these objects."""
    job = program_job(server_of_pods, {str(number): uri for number, uri in enumerate(PLACES)})
    monkeypatch.setenv(TOKEN_VARIABLE, submit(server_of_pods, job))
    return Store(store_in_pod(server_of_pods, job, "").address)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    (folder / "a.jsonl").write_bytes(b"one\n")
    (folder / "inner" / "b.bin").write_bytes(bytes(range(256)))
    return folder


@pytest.fixture
def published(store: Store, folder: Path) -> Artifact:
    return store.publish(folder, URI, "dataset", inputs={"source": "f" * 64}, facts={"n": 1})


def place(store: Store, uri: str) -> Path:
    path = store.local_path(uri)
    assert path is not None
    return path


@pytest.mark.requirement("Z8")
@pytest.mark.parametrize(
    ("uri", "bucket"),
    [
        ("s3://hanzo-ml/datasets/d/1/x", "hanzo-ml-datasets/datasets/d/1/x"),
        ("s3://hanzo-ml/checkpoints/r/1/x", "hanzo-ml-checkpoints/checkpoints/r/1/x"),
        ("s3://hanzo-ml/runs/r/x", "hanzo-ml-checkpoints/runs/r/x"),
        ("s3://hanzo-models/m/v1/x", "hanzo-models/m/v1/x"),
    ],
)
def test_logical_paths_map_to_their_buckets(
    in_folder: Store, in_s3: Store, s3: S3Server, tmp_path: Path, uri: str, bucket: str
) -> None:
    for store in (in_folder, in_s3):
        store.put_bytes(uri, b"data")
        assert store.get_bytes(uri) == b"data"
    assert (tmp_path / "the objects" / bucket).read_bytes() == b"data"
    assert s3.requests[0].path == f"/{bucket}"


@pytest.mark.parametrize(
    "uri",
    [
        "s3://hanzo-ml/secrets/x",
        "s3://elsewhere/x",
        "file:///etc/passwd",
        "s3://hanzo-models/../x",
        "s3://hanzo-ml/runs/r/../../datasets/d",
        "s3://hanzo-models/",
        "s3://hanzo-models/a//b",
        "/etc/passwd",
        "",
    ],
)
def test_uri_outside_the_store_is_refused(store: Store, uri: str) -> None:
    with pytest.raises(BrokenArtifact):
        store.put_bytes(uri, b"data")
    with pytest.raises(BrokenArtifact):
        store.local_path(uri)


def test_published_artifact_is_fetched_unchanged(store: Store, published: Artifact, folder: Path, tmp_path: Path) -> None:
    found = store.fetch(published, tmp_path / "cache")
    for name in ("a.jsonl", "inner/b.bin"):
        assert (found / name).read_bytes() == (folder / name).read_bytes()


def test_artifact_records_manifest_hash_and_total_size(store: Store, published: Artifact, folder: Path) -> None:
    assert store.sha256(f"{URI}/{MANIFEST_FILE}") == published.digest
    assert published.size_bytes == 4 + 256
    manifest = store.manifest(published)
    assert manifest.inputs == {"source": "f" * 64} and manifest.facts == {"n": 1}
    assert {file.path: file.sha256 for file in manifest.files} == {
        name: sha256_of(folder / name) for name in ("a.jsonl", "inner/b.bin")
    }
    assert store.find(URI) == store.find(URI + "/") == published


def test_publishing_the_same_folder_twice_makes_the_same_artifact(store: Store, published: Artifact, folder: Path) -> None:
    assert store.publish(folder, URI, "dataset", inputs={"source": "f" * 64}, facts={"n": 1}) == published


def test_stored_content_is_compared_without_sending_it(store: Store) -> None:
    store.put_bytes(URI, b"these")
    assert [store.has_content(URI, data) for data in (b"these", b"those", b"these ones")] == [True, False, False]
    assert not store.has_content(f"{URI}/none", b"these")


def test_stored_content_is_compared_by_size_with_kms_encryption(s3: S3Server) -> None:
    """With KMS the server returns no MD5, or that of the encrypted content."""
    store = Store(s3.address.model_copy(update={"encryption": "aws:kms"}), VARIABLES)
    store.put_bytes(URI, b"these")
    assert [store.has_content(URI, data) for data in (b"these", b"those", b"these ones")] == [True, True, False]


def test_pickled_store_keeps_its_keys(s3: S3Server) -> None:
    pickle.loads(pickle.dumps(Store(s3.address, VARIABLES))).put_bytes(URI, b"x")
    assert "the-access-key" in s3.requests[-1].headers["authorization"]


def test_signed_urls_are_available_only_from_s3(store: Store, s3: S3Server) -> None:
    store.put_bytes(URI, b"x")
    found = store.signed_url(URI, 60)
    assert (found is None) == (store.address != s3.address)
    asked = parse_qs(urlsplit(found or "").query)
    assert found is None or (asked["X-Amz-Signature"] and asked["X-Amz-Expires"] == ["60"])


def test_copied_object_survives_removal_of_its_source(store: Store, published: Artifact, s3: S3Server) -> None:
    source, copy = f"{URI}/a.jsonl", "s3://hanzo-ml/datasets/d/2/records/a.jsonl"
    store.copy(source, copy)
    store.put_bytes(source, b"another")
    store.remove(source)
    assert store.get_bytes(copy) == b"one\n"
    asked = [request.headers for request in s3.requests if "x-amz-copy-source" in request.headers]
    assert all(headers.get("x-amz-server-side-encryption") == "AES256" for headers in asked)
    with pytest.raises(FileNotFoundError):
        store.copy(source, copy)
    with pytest.raises(StoreUnavailable, match="its bucket is not that of"):
        store.copy(copy, "s3://hanzo-models/m/v1/x")
    assert store.get_bytes(copy) == b"one\n"


@pytest.mark.parametrize("victim", ["a.jsonl", "inner/b.bin", MANIFEST_FILE])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_corrupt_artifact_is_refused_naming_the_file(
    store: Store, published: Artifact, tmp_path: Path, victim: str, damage: str
) -> None:
    uri = f"{URI}/{victim}"
    data = store.get_bytes(uri)
    if damage == "remove":
        store.remove(uri)
    else:
        store.put_bytes(uri, data[:-1] + bytes([data[-1] ^ 1]) if damage == "flip" else data[:-1])
    with pytest.raises(BrokenArtifact, match=victim):
        store.fetch(published, tmp_path / "cache")


@pytest.mark.parametrize("spoiled", [bytes(256), b"half"], ids=["other bytes of the same size", "cut off"])
def test_corrupt_cached_file_is_downloaded_again(in_s3: Store, folder: Path, tmp_path: Path, spoiled: bytes) -> None:
    published = in_s3.publish(folder, URI, "dataset")
    (in_s3.fetch(published, tmp_path / "cache") / "inner/b.bin").write_bytes(spoiled)
    assert (in_s3.fetch(published, tmp_path / "cache") / "inner/b.bin").read_bytes() == bytes(range(256))


def test_corrupt_cached_file_is_hashed_once_before_download(
    in_s3: Store, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The download is hashed while streaming. Regression: 100 GB were read three more times."""
    published = in_s3.publish(folder, URI, "dataset")
    spoiled = in_s3.fetch(published, tmp_path / "cache") / "inner/b.bin"
    spoiled.write_bytes(bytes(256))
    hashed: list[str] = []

    def hash_file(path: Path) -> str:
        hashed.append(path.name)
        return sha256_of(path)

    monkeypatch.setattr("recipes.storage.checksums.hash_file", hash_file)
    assert in_s3.fetch(published, tmp_path / "cache") / "inner/b.bin" == spoiled
    assert spoiled.read_bytes() == bytes(range(256))
    assert sorted(hashed) == ["a.jsonl", "b.bin"]


@pytest.mark.parametrize("stray", ["b.jsonl", "inner/c.bin", "deeper/d.jsonl", ".hidden.jsonl"])
def test_files_outside_the_manifest_are_not_fetched(in_folder: Store, folder: Path, tmp_path: Path, stray: str) -> None:
    published = in_folder.publish(folder, URI, "dataset")
    in_folder.put_bytes(f"{URI}/{stray}", b"not of the dataset\n")
    found = in_folder.fetch(published, tmp_path / "cache")
    assert sorted(path.relative_to(found).as_posix() for path in found.rglob("*") if path.is_file()) == [
        "a.jsonl",
        "inner/b.bin",
    ]


def test_nested_artifact_does_not_prevent_fetching_in_place(in_folder: Store, folder: Path, tmp_path: Path) -> None:
    """Like the splits below a prepared version's records: nothing is copied for them."""
    published = in_folder.publish(folder, URI, "dataset")
    for name in ("split", "inner"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokens.arrow").write_bytes(b"tokens")
        in_folder.publish(tmp_path / name, f"{URI}/{name}", "split")
    (place(in_folder, URI) / "half#1").write_bytes(b"what another is just writing")
    assert in_folder.fetch(published, tmp_path / "cache") == place(in_folder, URI)


class Fetching(Store):
    """Calls back for each piece after reading it and before writing it."""

    def __init__(self, store: Store, on_piece: Callable[[], None]) -> None:
        super().__init__(store.address, VARIABLES)
        self._on_piece = on_piece

    def prefetch_pieces(self, artifact_uri: str, file: FileRecord) -> Iterator[bytes]:
        for piece in super().prefetch_pieces(artifact_uri, file):
            self._on_piece()
            yield piece


def test_concurrent_fetches_of_one_artifact_do_not_interfere(in_s3: Store, folder: Path, tmp_path: Path) -> None:
    """A pod starts fetching while another is in the middle of the same file."""
    published = in_s3.publish(folder, URI, "dataset")
    found: list[Path] = []
    first = Fetching(in_s3, lambda: found.append(in_s3.fetch(published, tmp_path / "cache")))
    assert first.fetch(published, tmp_path / "cache") == tmp_path / "cache" / published.digest
    assert {*found} == {tmp_path / "cache" / published.digest}, "the other was done before the first file of this one was"
    assert (found[0] / "inner/b.bin").read_bytes() == bytes(range(256))
    assert not list(tmp_path.rglob("*.part"))


def test_interrupted_fetch_leaves_no_file_and_day_old_leftovers_are_removed(
    in_s3: Store, folder: Path, tmp_path: Path
) -> None:
    published = in_s3.publish(folder, URI, "dataset")

    def break_off() -> None:
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        Fetching(in_s3, break_off).fetch(published, tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    young, old = (tmp_path / "cache" / published.digest / f".7-{letter * 16}.part" for letter in "ab")
    for path in (young, old):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 90_000, time.time() - 90_000))
    in_s3.fetch(published, tmp_path / "cache")
    assert young.exists() and not old.exists()


def test_a_large_file_is_fetched_in_parts(in_s3: Store, s3: S3Server, tmp_path: Path) -> None:
    """One connection per part: with a single connection a large model took an hour."""
    data = random.Random(0).randbytes(20 << 20)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_bytes(data)
    published = in_s3.publish(tmp_path / "model", URI, "weights")
    assert (in_s3.fetch(published, tmp_path / "cache") / "weights").read_bytes() == data
    asked = [
        request.headers.get("range") for request in s3.requests if request.method == "GET" and "weights" in request.path
    ]
    assert sorted(filter(None, asked)) == ["bytes=0-8388607", "bytes=16777216-20971519", "bytes=8388608-16777215"]


def test_ranges_of_a_replaced_object_are_not_mixed(in_s3: Store) -> None:
    uri = "s3://hanzo-models/m/1/x"
    in_s3.put_bytes(uri, b"old" * (5 << 20))
    parts = in_s3.open(uri).prefetch_ranges()
    assert next(parts)[:3] == b"old"
    opened = in_s3.open(uri)
    in_s3.put_bytes(uri, b"new" * (5 << 20))
    with pytest.raises(FileNotFoundError, match="replaced"):
        list(opened.prefetch_ranges())


class Meeting(Store):
    """Uploads of files that each wait until the given number are running."""

    def __init__(self, address: StoreAddress, others: int) -> None:
        super().__init__(address, VARIABLES)
        self.there = threading.Barrier(others)
        self.put: list[str] = []

    def put_file(self, uri: str, path: Path) -> None:
        self.there.wait(30)
        super().put_file(uri, path)
        self.put.append(uri)


def test_files_are_uploaded_concurrently_to_s3_and_sequentially_to_a_folder(
    s3: S3Server, in_folder: Store, tmp_path: Path
) -> None:
    for number in range(8):
        (tmp_path / "made" / f"{number}").mkdir(parents=True)
        (tmp_path / "made" / f"{number}" / "x").write_bytes(b"x")
    Meeting(s3.address, 4).publish(tmp_path / "made", URI, "dataset")
    alone = Meeting(in_folder.address, 1)
    alone.publish(tmp_path / "made", URI, "dataset")
    assert alone.put == sorted(alone.put)


def test_failed_file_upload_publishes_no_artifact(in_s3: Store, folder: Path) -> None:
    manifest = Manifest(kind="dataset", files=describe_files(folder))
    (folder / "inner" / "b.bin").unlink()
    with pytest.raises(FileNotFoundError):
        in_s3.publish_described(folder, URI, manifest)
    assert in_s3.find(URI) is None


@pytest.mark.parametrize("written", [b"", b'{"kind": "dataset"', b'{"kind": "dataset", "files": "none"}'])
def test_invalid_manifest_is_no_artifact(store: Store, written: bytes) -> None:
    store.put_bytes(f"{URI}/{MANIFEST_FILE}", written)
    assert store.find(URI) is None
    artifact = Artifact(kind="dataset", uri=URI, digest=hashlib.sha256(written).hexdigest(), size_bytes=0)
    with pytest.raises(BrokenArtifact, match="is not a manifest"):
        store.manifest(artifact)


def test_changed_manifest_is_refused(store: Store, published: Artifact, tmp_path: Path) -> None:
    """Otherwise the files it lists would be present and match it."""
    store.put_manifest(URI, store.manifest(published).model_copy(update={"facts": {"n": 2}}))
    for look in (store.manifest, lambda artifact: store.fetch(artifact, tmp_path)):
        with pytest.raises(BrokenArtifact, match=f"{MANIFEST_FILE} has SHA-256 .*, recorded is {published.digest}"):
            look(published)


def test_fetch_is_limited_to_selected_files(in_s3: Store, folder: Path, tmp_path: Path) -> None:
    artifact = in_s3.publish(folder, URI, "dataset")
    found = in_s3.fetch(artifact, tmp_path / "cache", only=["a.jsonl"])
    assert [path.name for path in found.rglob("*") if path.is_file()] == ["a.jsonl"]


def test_file_cached_concurrently_is_used_only_if_intact(
    in_s3: Store, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it is fetched: the file was replaced after the check, and is corrupt too."""
    artifact = in_s3.publish(folder, URI, "dataset")
    there = tmp_path / "cache" / artifact.digest / "a.jsonl"
    there.parent.mkdir(parents=True)
    there.write_bytes(b"half")
    looks = stores.find_file_corruption

    def while_another_writes(place: Path, file: FileRecord) -> str | None:
        problem = looks(place, file)
        if file.path == "a.jsonl":
            there.write_bytes(b"other half")
        return problem

    monkeypatch.setattr(stores, "find_file_corruption", while_another_writes)
    assert (in_s3.fetch(artifact, tmp_path / "cache") / "a.jsonl").read_bytes() == b"one\n"


@pytest.mark.parametrize("only", [None, ["a.jsonl"]])
def test_bucket_unmounted_during_fetch_is_an_outage_not_corruption(
    in_folder: Store, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, only: list[str] | None
) -> None:
    artifact = in_folder.publish(folder, URI, "dataset")
    manifest = in_folder.manifest(artifact)
    monkeypatch.setattr(in_folder, "manifest", lambda _: manifest)
    bucket = place(in_folder, "s3://hanzo-ml/datasets/x").parents[1]
    bucket.rename(tmp_path / "away")
    with pytest.raises(StoreUnavailable, match="mount it again"):
        in_folder.fetch(artifact, tmp_path / "cache", only)


def test_artifact_without_manifest_does_not_exist(store: Store) -> None:
    store.put_bytes(f"{URI}/a.jsonl", b"one\n")
    assert store.find(URI) is None


KILLED = """
import os, signal, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from recipes.contracts.job import StoreAddress
from recipes.storage.artifact_store import Store

class Killed(Store):
    def put_bytes(self, uri, data):  # the manifest is all that publish writes in this way
        os.kill(os.getpid(), signal.SIGKILL)

Killed(StoreAddress.model_validate_json(sys.argv[1])).publish(Path(sys.argv[2]), sys.argv[3], "dataset")
"""


def test_a_publisher_that_is_killed_before_the_manifest_publishes_nothing(
    store: Store, folder: Path, tmp_path: Path
) -> None:
    arguments = [store.address.model_dump_json(), str(folder), URI]
    assert (
        subprocess.run(
            [sys.executable, "-c", KILLED, *arguments], cwd=ROOT, env={**os.environ, **VARIABLES}, check=False
        ).returncode
        == -9
    )
    assert len(store.list(URI)) == 2
    assert store.find(URI) is None
    assert store.fetch(store.publish(folder, URI, "dataset"), tmp_path / "cache").is_dir()


def test_delete_removes_the_artifact_and_nothing_else(store: Store, folder: Path) -> None:
    for uri in (URI, URI + "2", "s3://hanzo-ml/datasets/d/10/records"):
        store.publish(folder, uri, "dataset")
    store.delete(URI)
    assert store.list(URI) == []
    assert len(store.list(URI + "2")) == len(store.list("s3://hanzo-ml/datasets/d/10")) == 3


class Noting(Store):
    """Records the order in which objects are deleted."""

    def __init__(self, store: Store) -> None:
        super().__init__(store.address)
        self.removed: list[str] = []

    def remove(self, uri: str) -> None:
        self.removed.append(uri)
        super().remove(uri)


def test_deleting_begins_with_the_manifest(in_folder: Store, folder: Path) -> None:
    in_folder.publish(folder, URI, "dataset")
    noting = Noting(in_folder)
    noting.delete(URI)
    assert noting.removed == [f"{URI}/{name}" for name in (MANIFEST_FILE, "a.jsonl", "inner/b.bin")]


def test_delete_is_idempotent(store: Store, folder: Path) -> None:
    store.publish(folder, URI, "dataset")
    for _ in range(2):
        store.delete(URI)
    assert store.list(URI) == []


def test_listing_survives_concurrent_deletion(in_folder: Store) -> None:
    place = f"{URI}/many"

    def come_and_go() -> None:
        for turn in range(1_000):
            for name in range(5):
                in_folder.put_bytes(f"{place}/{turn % 7}/{name}", b"x")
            in_folder.delete(f"{place}/{turn % 7}")

    with ThreadPoolExecutor(1) as other:
        ended = other.submit(come_and_go)
        while not ended.done():
            in_folder.entries(URI)
        ended.result()


def test_missing_object_raises_file_not_found(store: Store) -> None:
    for look in (store.get_bytes, store.sha256, store.size):
        with pytest.raises(FileNotFoundError):
            look(f"{URI}/nothing")
    assert store.list(URI) == []
    assert store.find(URI) is None


safe = st.characters(codec="utf-8", exclude_characters="/\\\0", exclude_categories=["Cs", "Cc"])
part = st.text(safe, min_size=1, max_size=20).filter(lambda name: name not in (".", "..") and not name.startswith("s3:"))


@given(part, st.binary(max_size=100))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_object_names_with_special_characters_round_trip(store: Store, name: str, data: bytes) -> None:
    """Spaces, percent signs, question marks, colons: a name round-trips or is refused."""
    uri = f"s3://hanzo-models/names/{name}/x"
    try:
        store.put_bytes(uri, data)
    except BrokenArtifact:
        return
    assert store.get_bytes(uri) == data
    assert [(entry.uri, entry.size) for entry in store.entries(f"s3://hanzo-models/names/{name}")] == [(uri, len(data))]
    assert store.list_folder("s3://hanzo-models/names") == ([], [f"s3://hanzo-models/names/{name}"])
    assert store.list_folder(f"s3://hanzo-models/names/{name}") == ([ObjectEntry(uri, len(data))], [])
    store.delete(uri)
    assert store.list(f"s3://hanzo-models/names/{name}") == []


def test_folder_listing_is_not_recursive(store: Store, s3: S3Server) -> None:
    place = "s3://hanzo-models/m"
    for name in ("1", "b/2", "b/c/3", "d/4", "5"):
        store.put_bytes(f"{place}/{name}", name.encode())
    store.put_bytes(f"{place}m/6", b"beside it")
    s3.requests.clear()
    found = [ObjectEntry(f"{place}/1", 1), ObjectEntry(f"{place}/5", 1)], [f"{place}/b", f"{place}/d"]
    assert store.list_folder(place) == store.list_folder(f"{place}/") == found
    assert store.list_folder(f"{place}/b/c") == ([ObjectEntry(f"{place}/b/c/3", 5)], [])
    assert store.list_folder(f"{place}/1") == store.list_folder(f"{place}/none") == ([], [])
    assert all("delimiter" in request.query for request in s3.requests)
    store.delete(f"{place}/b")
    assert store.list_folder(place)[1] == [f"{place}/d"], "in a folder too, whose empty folders stay"
    assert store.exists(f"{place}/d") and not store.exists(f"{place}/b")
    store.remove_empty_folders(place)
    assert store.list_folder(place) == ([ObjectEntry(f"{place}/1", 1), ObjectEntry(f"{place}/5", 1)], [f"{place}/d"])
    folder = store.local_path(place)
    assert folder is None or {path.name for path in folder.iterdir()} == {"1", "5", "d"}


async def arriving(size: int, then: BaseException | None = None) -> AsyncIterator[bytes]:
    """Yield `size` bytes in pieces that do not align with parts, then perhaps fail."""
    piece = bytes(range(256)) * 300
    while size > 0:
        await asyncio.sleep(0)
        yield piece[:size]
        size -= len(piece)
    if then is not None:
        raise then


@pytest.mark.parametrize("size", [0, 1, 5 << 20, (12 << 20) + 1])
def test_stream_is_stored_unchanged(store: Store, size: int) -> None:
    uri = "s3://hanzo-models/m/1/stream"
    asyncio.run(store.put_stream(uri, arriving(size), size or None))
    assert store.size(uri) == size
    assert len(store.get_bytes(uri)) == size
    assert b"".join(store.open(uri).chunks(100, 200)) == (bytes(range(256)) * 300)[: min(size, 200)][100:]
    assert store.list("s3://hanzo-models/m/1") == [uri]


@pytest.mark.parametrize("of", ["stream", "file"])
def test_large_object_is_uploaded_to_s3_in_parts(in_s3: Store, s3: S3Server, tmp_path: Path, of: str) -> None:
    """A single request would hold it in memory, and S3 limits it to 5 GB."""
    uri, data, file = "s3://hanzo-models/m/1/x", random.Random(0).randbytes(12 << 20), tmp_path / "file"

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(data), 100_000):
            yield data[start : start + 100_000]

    if of == "stream":
        asyncio.run(in_s3.put_stream(uri, pieces(), len(data)))
    else:
        file.write_bytes(data)
        in_s3.put_file(uri, file)
    sent = [(request.method, parse_qs(request.query, keep_blank_values=True)) for request in s3.requests]
    numbers = sorted(query.get("partNumber", ["none"])[0] for method, query in sent if method == "PUT")
    assert numbers == (["1", "2", "3"] if of == "stream" else ["1", "2"])
    assert [sorted(query) for method, query in sent if method == "POST"] == [["uploads"], ["uploadId"]]
    assert in_s3.get_bytes(uri) == data
    assert not s3.client.list_multipart_uploads(Bucket="hanzo-models").get("Uploads")


def test_stream_is_stored_completely_when_a_piece_ends_the_first_part(store: Store) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for letter in b"abcdefg":
            yield bytes([letter]) * (1 << 20)

    asyncio.run(store.put_stream(URI, pieces()))
    assert store.get_bytes(URI)[:: 1 << 20] == b"abcdefg"


def test_part_size_grows_to_respect_the_part_limit(
    in_s3: Store, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a file of 60 GB."""
    monkeypatch.setattr(object_transfer, "MAX_PARTS", 2)
    (tmp_path / "file").write_bytes(bytes((11 << 20) + 1))
    in_s3.put_file("s3://hanzo-models/m/1/x", tmp_path / "file")
    assert sum("partNumber" in request.query for request in s3.requests) == 2


@pytest.mark.requirement("I12")
@pytest.mark.parametrize("size", [1, 5 << 20, 50 * 10**9, 5 * 10**12])
def test_part_count_stays_within_s3_limits_for_any_size(size: int) -> None:
    assert size / object_transfer.choose_part_bytes(size) <= 10_000 and object_transfer.choose_part_bytes(size) >= 5 << 20
    assert 140 * 10**9 / object_transfer.choose_part_bytes(None) <= 10_000


@pytest.mark.parametrize("size", [100, 12 << 20])
def test_interrupted_stream_keeps_the_previous_object(store: Store, s3: S3Server, tmp_path: Path, size: int) -> None:
    uri = "s3://hanzo-models/m/1/stream"
    store.put_bytes(uri, b"old")
    for name in ("stream", "new"):
        with pytest.raises(ConnectionError, match="gone"):
            asyncio.run(store.put_stream(f"s3://hanzo-models/m/1/{name}", arriving(size, ConnectionError("gone"))))
    assert [(entry.uri, entry.size) for entry in store.entries("s3://hanzo-models/m/1")] == [(uri, 3)]
    assert not list(tmp_path.rglob("*#*"))
    assert not s3.client.list_multipart_uploads(Bucket="hanzo-models").get("Uploads")


def test_replaced_object_is_not_mixed_while_reading(store: Store) -> None:
    uri = "s3://hanzo-models/m/1/x"
    store.put_bytes(uri, b"old" * 1000)
    opened = store.open(uri)
    store.put_bytes(uri, b"new" * 1000)
    with pytest.raises(FileNotFoundError, match="replaced"):
        list(opened.chunks())


def test_small_object_is_readable_during_constant_replacement(store: Store) -> None:
    """Regression: two processes recorded an incident, and a read during the write restarted the list."""
    texts = [letter * length for letter, length in ((b"a", 900), (b"b", 1_000))]
    store.put_bytes(URI, texts[0])
    done = threading.Event()

    def replace() -> None:
        while not done.is_set():
            for text in texts:
                store.put_bytes(URI, text)

    with ThreadPoolExecutor(1) as pool:
        replaced = pool.submit(replace)
        try:
            assert all(store.get_bytes(URI) in texts for _ in range(60))
        finally:
            done.set()
        replaced.result()


@pytest.fixture
def linked(in_folder: Store, tmp_path: Path) -> Iterator[str]:
    """Return a store prefix with symbolic links to a file and a folder outside."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    in_folder.put_bytes(f"{URI}/a", b"a")
    (place(in_folder, URI) / "file").symlink_to(outside / "secret")
    (place(in_folder, URI) / "folder").symlink_to(outside)
    yield URI
    assert (outside / "secret").read_bytes() == b"secret"
    assert [path.name for path in outside.iterdir()] == ["secret"]


def test_symbolic_link_in_store_folder_is_refused(in_folder: Store, linked: str) -> None:
    assert in_folder.list(linked) == [f"{linked}/a"]
    for name in ("file", "folder", "folder/secret"):
        uri = f"{linked}/{name}"
        for act in (in_folder.get_bytes, in_folder.list, in_folder.exists, in_folder.delete, in_folder.local_path):
            with pytest.raises(BrokenArtifact, match="link"):
                act(uri)
        with pytest.raises(BrokenArtifact, match="link"):
            in_folder.put_bytes(uri, b"attack")


def test_old_partial_files_are_removed_from_a_folder_store(in_folder: Store) -> None:
    in_folder.put_bytes(f"{URI}/whole", b"whole")
    young, old = (place(in_folder, f"{URI}/{name}") for name in ("young#1", "old#23"))
    for path in (young, old):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 90_000, time.time() - 90_000))
    assert in_folder.list(URI) == [f"{URI}/whole"]
    assert remove_abandoned_uploads(in_folder.address) == 1
    assert young.exists() and not old.exists()
    assert in_folder.get_bytes(f"{URI}/whole") == b"whole"


def test_old_multipart_uploads_are_removed_from_s3(in_s3: Store, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    bucket = BUCKETS["datasets"]
    s3.client.create_multipart_upload(Bucket=bucket, Key="datasets/d/1/half")
    assert remove_abandoned_uploads(in_s3.address) == 0
    assert s3.client.list_multipart_uploads(Bucket=bucket)["Uploads"]
    s3.uploads_began -= timedelta(hours=25)
    assert remove_abandoned_uploads(in_s3.address) == 1
    assert not s3.client.list_multipart_uploads(Bucket=bucket).get("Uploads")


def test_concurrent_upload_cleanup_by_another_server_is_tolerated(
    in_s3: Store, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every server process cleans up. Regression: the second one stopped at the first missing upload."""
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    bucket = BUCKETS["datasets"]
    for name in ("half", "quarter"):
        s3.client.create_multipart_upload(Bucket=bucket, Key=f"datasets/d/1/{name}")
    s3.uploads_began -= timedelta(hours=25)

    def another(params: dict[str, str], **_: object) -> None:
        if params["Key"].endswith("half"):
            s3.client.abort_multipart_upload(**params)

    monkeypatch.setattr(boto3, "DEFAULT_SESSION", boto3.session.Session())
    boto3.DEFAULT_SESSION.events.register("provide-client-params.s3.AbortMultipartUpload", another)
    assert remove_abandoned_uploads(in_s3.address) == 1
    assert not s3.client.list_multipart_uploads(Bucket=bucket).get("Uploads")


@pytest.mark.requirement("X1")
def test_every_put_is_signed_with_the_key_given_and_encrypted_at_rest(in_s3: Store, s3: S3Server, folder: Path) -> None:
    in_s3.put_bytes(f"{URI}/bytes", b"x")
    in_s3.put_file(f"{URI}/file", folder / "a.jsonl")
    asyncio.run(in_s3.put_stream(f"{URI}/stream", arriving(6 << 20)))
    puts = [request for request in s3.requests if request.method in ("PUT", "POST") and "partNumber" not in request.query]
    # Part requests and the completion of a multipart upload inherit the encryption from its creation.
    beginnings = [request for request in puts if "uploadId" not in request.query]
    assert len(beginnings) == 3
    assert {request.headers.get("x-amz-server-side-encryption") for request in beginnings} == {"AES256"}
    assert all(
        "Credential=the-access-key/" in request.headers["authorization"] for request in s3.requests if request in puts
    )


def test_every_body_is_put_with_its_checksum(in_s3: Store, s3: S3Server, tmp_path: Path) -> None:
    """Including each part of a large one: a complete object consists of verified parts."""
    data = random.Random(0).randbytes(12 << 20)
    (tmp_path / "large").write_bytes(data)
    in_s3.put_bytes(f"{URI}/bytes", b"x")
    in_s3.put_file(f"{URI}/file", tmp_path / "large")
    asyncio.run(in_s3.put_stream(f"{URI}/stream", arriving(6 << 20)))
    bodies = [request for request in s3.requests if request.method == "PUT"]
    assert len(bodies) == 1 + 2 + 1
    assert all(request.headers["x-amz-checksum-sha256"] for request in bodies)
    begun = [request for request in s3.requests if request.method == "POST" and "uploads" in request.query]
    assert [request.headers["x-amz-checksum-algorithm"] for request in begun] == ["SHA256", "SHA256"]
    assert in_s3.get_bytes(f"{URI}/file") == data
    in_s3.copy(f"{URI}/file", f"{URI}/copy")
    assert in_s3.get_bytes(f"{URI}/copy") == data


@pytest.mark.parametrize("of", ["bytes", "small file", "large file", "stream"])
def test_body_corrupted_in_transit_is_refused_and_previous_object_kept(
    in_s3: Store, s3: S3Server, tmp_path: Path, of: str
) -> None:
    uri, path = f"{URI}/x", tmp_path / "x"
    path.write_bytes(bytes(12 << 20 if of == "large file" else 1000))

    def put() -> None:
        if of == "bytes":
            in_s3.put_bytes(uri, b"new")
        elif of == "stream":
            asyncio.run(in_s3.put_stream(uri, arriving(6 << 20)))
        else:
            in_s3.put_file(uri, path)

    in_s3.put_bytes(uri, b"old")
    s3.breaking = 1
    with pytest.raises(StoreUnavailable, match="BadDigest"):
        put()
    assert s3.breaking == 0 and in_s3.get_bytes(uri) == b"old"
    assert not s3.client.list_multipart_uploads(Bucket=BUCKETS["datasets"]).get("Uploads")
    put()
    assert in_s3.get_bytes(uri) != b"old"


def test_checksums_are_not_sent_when_disabled(s3: S3Server) -> None:
    Store(s3.address.model_copy(update={"checksum": "none"}), VARIABLES).put_bytes(f"{URI}/x", b"x")
    assert "x-amz-checksum-sha256" not in s3.requests[-1].headers


@pytest.mark.parametrize(
    ("encryption", "key", "sent"),
    [("aws:kms", "key-1", ("aws:kms", "key-1")), ("none", None, (None, None))],
)
def test_encryption_follows_the_store_address(
    s3: S3Server, encryption: str, key: str | None, sent: tuple[str | None, str | None]
) -> None:
    address = StoreAddress.model_validate({**s3.address.model_dump(), "encryption": encryption, "kms_key": key})
    Store(address, VARIABLES).put_bytes(f"{URI}/x", b"x")
    names = ("x-amz-server-side-encryption", "x-amz-server-side-encryption-aws-kms-key-id")
    assert tuple(s3.requests[-1].headers.get(name) for name in names) == sent


def test_missing_bucket_is_not_reported_as_missing_file(s3: S3Server) -> None:
    store = Store(s3.address.model_copy(update={"buckets": {**BUCKETS, "models": "no-such-bucket"}}), VARIABLES)
    uri = "s3://hanzo-models/m/1/x"
    puts = (lambda uri: store.put_bytes(uri, b"x"), lambda uri: store.open_known_size(uri, 1).sha256())
    for ask in (store.find, store.modified_ms, store.list, store.exists, *puts):
        with pytest.raises(StoreRefuses, match=f"{s3.url} has no bucket no-such-bucket"):
            ask(uri)


def test_missing_object_in_a_known_bucket_takes_one_request(in_s3: Store, s3: S3Server) -> None:
    uri = "s3://hanzo-models/m/1/x"
    in_s3.find(uri)
    s3.requests.clear()
    assert in_s3.find(uri) is None
    assert [request.method for request in s3.requests] == ["HEAD"]


def test_full_disk_raises_store_full_and_leaves_no_file(in_folder: Store) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limit[1]))  # larger files fail as on a full disk
    try:
        with pytest.raises(StoreFull):
            asyncio.run(in_folder.put_stream(f"{URI}/x", arriving(12 << 20)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert in_folder.list(URI) == []
    assert not list(place(in_folder, URI).parent.rglob("x#*"))


def proportional_set_size() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


@pytest.mark.slow
def test_streaming_memory_is_independent_of_object_size(in_folder: Store) -> None:
    uri = f"{URI}/large"
    asyncio.run(in_folder.put_stream(uri, arriving(20 << 20), 20 << 20))  # warm up the libraries
    before, peak, ended = proportional_set_size(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.01):
            peak = max(peak, proportional_set_size())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        asyncio.run(in_folder.put_stream(uri, arriving(300 << 20), 300 << 20))
        digest = hashlib.sha256()
        for chunk in in_folder.open(uri).chunks():
            digest.update(chunk)
    finally:
        ended.set()
        watcher.join()
    assert in_folder.size(uri) == 300 << 20
    assert peak - before < 40 << 20


def test_modification_time_is_in_milliseconds(in_folder: Store) -> None:
    in_folder.put_bytes(URI, b"x")
    os.utime(place(in_folder, URI), (1_000.25, 1_000.25))
    assert in_folder.modified_ms(URI) == 1_000_250
