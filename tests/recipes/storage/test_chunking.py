"""Content-defined chunks: independent of input pieces; a change in the middle changes few chunks."""

import random

import pytest

from recipes.storage.artifact_store import BrokenArtifact
from recipes.storage.chunking import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES, Chunker
from recipes.storage.locations import chunk_uri


def cut(data: bytes, piece: int = 1 << 20) -> list[bytes]:
    chunker = Chunker()
    found = [chunk for start in range(0, len(data), piece) for chunk in chunker.push(data[start : start + piece])]
    return [*found, *chunker.finish()]


def text(size: int, seed: int = 1) -> bytes:
    words = [f"word{number}" for number in range(2000)]
    draw = random.Random(seed)
    return " ".join(draw.choices(words, k=size // 8)).encode()[:size]


@pytest.fixture(scope="module")
def corpus() -> bytes:
    return text(24_000_000)


def test_chunks_join_to_the_input_within_size_limits(corpus: bytes) -> None:
    chunks = cut(corpus)
    assert b"".join(chunks) == corpus
    assert all(MIN_CHUNK_BYTES <= len(chunk) <= MAX_CHUNK_BYTES for chunk in chunks[:-1])
    assert 0.6e6 < len(corpus) / len(chunks) < 1.8e6


@pytest.mark.parametrize("piece", [997, 100_000, 30_000_000])
def test_chunking_is_independent_of_input_pieces(corpus: bytes, piece: int) -> None:
    data = corpus[:9_000_000]
    assert cut(data, piece) == cut(data)


@pytest.mark.parametrize("change", ["insert", "remove", "replace"])
def test_local_change_alters_only_nearby_chunks(corpus: bytes, change: str) -> None:
    middle = len(corpus) // 2
    between = {"insert": b"something new", "remove": b"", "replace": b"X" * 5}[change]
    changed = corpus[:middle] + between + corpus[middle + (0 if change == "insert" else 5) :]
    new = set(cut(changed)) - set(cut(corpus))
    assert 1 <= len(new) <= 3


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x",
        bytes(MIN_CHUNK_BYTES),
        bytes(MIN_CHUNK_BYTES + 1),
        bytes(range(256)) * 40_000,
        b"\n" * (MAX_CHUNK_BYTES + 1),
    ],
    ids=["empty", "one byte", "least", "least and one", "repeated", "most and one"],
)
def test_uniform_data_round_trips_through_chunks(data: bytes) -> None:
    assert b"".join(cut(data)) == data


def test_chunks_are_shared_within_one_organization_only() -> None:
    name = "ab" * 32
    assert chunk_uri("s3://hanzo-ml/datasets/d/1/x", name) == f"s3://hanzo-ml/datasets/_chunks/ab/{name}"
    assert chunk_uri("s3://hanzo-ml/datasets/@acme/d/1/x", name) == f"s3://hanzo-ml/datasets/@acme/_chunks/ab/{name}"
    with pytest.raises(BrokenArtifact):
        chunk_uri("s3://hanzo-models/m/v1", name)
