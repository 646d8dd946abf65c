"""Reading a range: exactly its own lines across file and chunk boundaries, without excess reads."""

import pickle
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recipes.contracts.job import StoreAddress
from recipes.preparation.plan import Range, cut_ranges
from recipes.preparation.read_stage import read_line_batches
from recipes.preparation.source import ChunkedFile, LocalFile, Source
from recipes.storage.artifact_store import BrokenArtifact, Store
from recipes.storage.locations import CHUNKS_FOLDER
from recipes.storage.manifest import Artifact
from tests.recipes.preparation.preparation_workspace import BUCKETS, in_chunks
from tests.support.s3_server import VARIABLES, S3Server

URI = "s3://hanzo-ml/datasets/d/1/records"
CHUNK, RANGE = 1000, 4000
LINES = [b"%06d" % number + b"x" * (number % 60) + b"\n" for number in range(1200)]


def in_folder(folder: Path) -> Store:
    return Store(StoreAddress(root=(folder / "objects").as_uri(), buckets=BUCKETS))


def dataset(store: Store, folder: Path, data: bytes, chunk_bytes: int) -> Artifact:
    (folder / "records.jsonl").write_bytes(data)
    return in_chunks(store, URI, folder / "records.jsonl", chunk_bytes)


def read(file: LocalFile | ChunkedFile, place: Range) -> list[bytes]:
    return [line for lines in read_line_batches(file, place) for line in lines]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
@given(
    lines=st.lists(st.text("ab", max_size=9), min_size=1, max_size=20),
    ends=st.booleans(),
    chunk_bytes=st.integers(1, 40),
    range_bytes=st.integers(4, 60),
)
def test_every_line_is_in_one_range(
    tmp_path: Path, lines: list[str], ends: bool, chunk_bytes: int, range_bytes: int
) -> None:
    data = ("\n".join(lines) + "\n" * ends).encode()
    store = in_folder(tmp_path)
    source = Source(store, dataset(store, tmp_path, data, chunk_bytes), tmp_path)
    whole = LocalFile(tmp_path / "records.jsonl")
    places = cut_ranges(source.files.values(), range_bytes)
    found = [read(source.range_file(place), place) for place in places]
    assert found == [read(whole, place) for place in places]
    assert b"".join(line for lines in found for line in lines) == data
    assert all(line.count(b"\n") <= 1 for lines in found for line in lines)


def test_a_range_fetches_its_own_chunks(tmp_path: Path, s3: S3Server) -> None:
    store = Store(s3.address, VARIABLES)  # workers need the same keys, which are not in this environment
    source = Source(store, dataset(store, tmp_path, b"".join(LINES), CHUNK), tmp_path)
    places = cut_ranges(source.files.values(), RANGE)
    asked: Counter[str] = Counter()
    for place in places:
        s3.requests.clear()
        assert read(pickle.loads(pickle.dumps(source.range_file(place))), place)
        fetched = [each.path for each in s3.requests if each.method == "GET"]
        assert all(CHUNKS_FOLDER in path for path in fetched), "no worker reads the manifest, which may be of many chunks"
        assert len(fetched) <= RANGE // CHUNK + 2, "one chunk before its first line, and one behind its last"
        asked.update(fetched)
    (file,) = source.files.values()
    assert len(asked) == len(file.chunks)
    assert list(tmp_path.iterdir()) == [tmp_path / "records.jsonl"], "nothing of it is kept"


def test_range_fetches_only_its_own_files_when_unchunked(tmp_path: Path, s3: S3Server) -> None:
    store, raw = Store(s3.address, VARIABLES), tmp_path / "raw"
    for name in ("test", "train"):
        (raw / name).mkdir(parents=True)
        (raw / name / f"{name}-00000.jsonl").write_bytes(b"".join(LINES))
    artifact = store.publish(raw, URI, "dataset")
    source = Source(store, artifact, tmp_path / "cache")
    first, *_, last = cut_ranges(source.files.values(), RANGE)
    s3.requests.clear()
    assert read(source.range_file(first), first) + read(source.range_file(first), first) == 2 * read(
        LocalFile(raw / first.file), first
    )
    assert [each.path.rpartition("/")[2] for each in s3.requests if each.method == "GET"][1:] == ["test-00000.jsonl"]
    assert last.file == "train/train-00000.jsonl"
    assert read(source.range_file(last), last)[-1] == LINES[-1]
    both = Source(store, artifact, tmp_path / "both")
    s3.requests.clear()
    both.fetch(both.files)
    names = [each.path.rpartition("/")[2] for each in s3.requests if each.method == "GET"]
    assert names.pop(0) == "manifest.json"
    assert sorted(names) == ["test-00000.jsonl", "train-00000.jsonl"], "the manifest is read once for all of them"
    assert [read(both.range_file(place), place) for place in (first, last)] == [
        read(source.range_file(place), place) for place in (first, last)
    ]


@pytest.mark.parametrize("data", [None, b"other"])
def test_missing_or_altered_chunk_is_refused(tmp_path: Path, data: bytes | None) -> None:
    store = in_folder(tmp_path)
    source = Source(store, dataset(store, tmp_path, b"".join(LINES), CHUNK), tmp_path)
    chunk = sorted(uri for uri in store.list(f"s3://hanzo-ml/datasets/{CHUNKS_FOLDER}"))[0]
    if data is None:
        store.remove(chunk)
    else:
        store.put_bytes(chunk, data)
    places = cut_ranges(source.files.values(), RANGE)
    with pytest.raises(BrokenArtifact, match="is missing" if data is None else "has SHA-256"):
        for place in places:
            read(source.range_file(place), place)
