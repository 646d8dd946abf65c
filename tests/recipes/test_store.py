"""The object store: what is published comes back verified; half an artifact does not exist; names are only names."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recipes.schema import Artifact, StoreAddress
from recipes.store import MANIFEST, BrokenArtifact, Store, sha256_of

ROOT = Path(__file__).resolve().parents[2]
BUCKETS = {"datasets": "hanzo-ml-datasets", "checkpoints": "hanzo-ml-checkpoints", "models": "hanzo-models"}
URI = "s3://hanzo-ml/datasets/d/1/records"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(StoreAddress(root=(tmp_path / "the objects").as_uri(), buckets=BUCKETS))


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


class Remote(Store):
    """The same bytes, but not on this machine: everything is downloaded."""

    def local_path(self, uri: str) -> Path | None:
        return None


def place(store: Store, uri: str) -> Path:
    path = store.local_path(uri)
    assert path is not None
    return path


@pytest.mark.parametrize(
    ("uri", "bucket"),
    [
        ("s3://hanzo-ml/datasets/d/1/x", "hanzo-ml-datasets/datasets/d/1/x"),
        ("s3://hanzo-ml/checkpoints/r/1/x", "hanzo-ml-checkpoints/checkpoints/r/1/x"),
        ("s3://hanzo-ml/runs/r/x", "hanzo-ml-checkpoints/runs/r/x"),
        ("s3://hanzo-models/m/v1/x", "hanzo-models/m/v1/x"),
    ],
)
def test_the_logical_paths_of_the_specification_lie_in_their_buckets(
    store: Store, tmp_path: Path, uri: str, bucket: str
) -> None:
    store.put_bytes(uri, b"data")
    assert (tmp_path / "the objects" / bucket).read_bytes() == b"data"
    assert store.get_bytes(uri) == b"data"


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
def test_what_is_no_place_of_the_store_is_refused(store: Store, uri: str) -> None:
    with pytest.raises(BrokenArtifact):
        store.put_bytes(uri, b"data")
    with pytest.raises(BrokenArtifact):
        store.local_path(uri)


@pytest.mark.parametrize("kind", [Store, Remote])
def test_what_was_published_is_fetched_as_it_was(
    store: Store, published: Artifact, folder: Path, tmp_path: Path, kind: type[Store]
) -> None:
    found = kind(store.address).fetch(published, tmp_path / "cache")
    for name in ("a.jsonl", "inner/b.bin"):
        assert (found / name).read_bytes() == (folder / name).read_bytes()


def test_the_pointer_names_the_manifest_by_its_hash_and_counts_every_byte(
    store: Store, published: Artifact, folder: Path
) -> None:
    assert sha256_of(place(store, f"{URI}/{MANIFEST}")) == published.digest
    assert published.size_bytes == 4 + 256
    manifest = store.manifest(published)
    assert manifest.inputs == {"source": "f" * 64} and manifest.facts == {"n": 1}
    assert {file.path: file.sha256 for file in manifest.files} == {
        name: sha256_of(folder / name) for name in ("a.jsonl", "inner/b.bin")
    }
    assert store.find(URI) == store.find(URI + "/") == published


def test_publishing_the_same_folder_twice_makes_the_same_artifact(store: Store, published: Artifact, folder: Path) -> None:
    assert store.publish(folder, URI, "dataset", inputs={"source": "f" * 64}, facts={"n": 1}) == published


@pytest.mark.parametrize("kind", [Store, Remote])
@pytest.mark.parametrize("victim", ["a.jsonl", "inner/b.bin", MANIFEST])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_artifact_is_not_fetched_and_the_damage_is_named(
    store: Store, published: Artifact, tmp_path: Path, kind: type[Store], victim: str, damage: str
) -> None:
    path = place(store, f"{URI}/{victim}")
    data = path.read_bytes()
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]) if damage == "flip" else data[:-1])
    with pytest.raises(BrokenArtifact, match=victim):
        kind(store.address).fetch(published, tmp_path / "cache")


def test_a_spoiled_download_is_made_again(store: Store, published: Artifact, tmp_path: Path) -> None:
    remote = Remote(store.address)
    cached = remote.fetch(published, tmp_path / "cache") / "inner/b.bin"
    cached.write_bytes(bytes(256))  # the same size, other bytes: a bad disk, or a kill of the machine
    assert (remote.fetch(published, tmp_path / "cache") / "inner/b.bin").read_bytes() == bytes(range(256))


def test_a_download_that_was_cut_off_is_made_again(store: Store, published: Artifact, tmp_path: Path) -> None:
    remote = Remote(store.address)
    cached = remote.fetch(published, tmp_path / "cache") / "inner/b.bin"
    cached.write_bytes(b"half")
    assert (remote.fetch(published, tmp_path / "cache") / "inner/b.bin").read_bytes() == bytes(range(256))


def test_half_an_artifact_does_not_exist(store: Store) -> None:
    store.put_bytes(f"{URI}/a.jsonl", b"one\n")
    assert store.find(URI) is None


KILLED = """
import os, signal, sys
from pathlib import Path
from recipes.schema import StoreAddress
from recipes.store import Store

class Killed(Store):
    def put_bytes(self, uri, data):  # the manifest is all that publish writes in this way
        os.kill(os.getpid(), signal.SIGKILL)

Killed(StoreAddress.model_validate_json(sys.argv[1])).publish(Path(sys.argv[2]), sys.argv[3], "dataset")
"""


def test_a_publisher_that_is_killed_before_the_manifest_publishes_nothing(store: Store, folder: Path) -> None:
    arguments = [store.address.model_dump_json(), str(folder), URI]
    assert subprocess.run([sys.executable, "-c", KILLED, *arguments], cwd=ROOT, check=False).returncode == -9
    assert len(store.list(URI)) == 2
    assert store.find(URI) is None
    assert store.fetch(store.publish(folder, URI, "dataset"), folder).is_dir()


def test_deleting_takes_all_of_it_and_nothing_beside_it(store: Store, folder: Path) -> None:
    for uri in (URI, URI + "2", "s3://hanzo-ml/datasets/d/10/records"):
        store.publish(folder, uri, "dataset")
    store.delete(URI)
    assert store.list(URI) == []
    assert len(store.list(URI + "2")) == len(store.list("s3://hanzo-ml/datasets/d/10")) == 3


def test_deleting_begins_with_the_manifest(store: Store, published: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    real = Store._locate
    deleting = store.list(URI)
    monkeypatch.setattr(Store, "_locate", lambda self, uri: order.append(uri) or real(self, uri))
    store.delete(URI)
    assert next(uri for uri in order if uri in deleting) == f"{URI}/{MANIFEST}"


def test_what_is_not_there_is_a_file_not_found(store: Store) -> None:
    for look in (store.get_bytes, store.sha256):
        with pytest.raises(FileNotFoundError):
            look(f"{URI}/nothing")
    assert store.list(URI) == []
    assert store.find(URI) is None


safe = st.characters(codec="utf-8", exclude_characters="/\\\0", exclude_categories=["Cs", "Cc"])
part = st.text(safe, min_size=1, max_size=20).filter(lambda name: name not in (".", "..") and not name.startswith("s3:"))


@given(part, st.binary(max_size=100))
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_name_is_only_a_name(store: Store, name: str, data: bytes) -> None:
    """Spaces, percent signs, question marks, colons: what was put under a name is found under it, or refused."""
    uri = f"s3://hanzo-models/names/{name}/x"
    try:
        store.put_bytes(uri, data)
    except BrokenArtifact:
        return
    assert store.get_bytes(uri) == data
    assert store.list(f"s3://hanzo-models/names/{name}") == [uri]
    assert place(store, uri).read_bytes() == data
    store.delete(uri)
    assert store.list(f"s3://hanzo-models/names/{name}") == []
