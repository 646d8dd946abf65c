"""Chunks: cut where the content says, whatever the pieces in which it came; a change in the middle changes few of them."""

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


def test_the_chunks_are_the_bytes_and_of_the_sizes_that_were_promised(corpus: bytes) -> None:
    chunks = cut(corpus)
    assert b"".join(chunks) == corpus
    assert all(MIN_CHUNK_BYTES <= len(chunk) <= MAX_CHUNK_BYTES for chunk in chunks[:-1])
    assert 0.6e6 < len(corpus) / len(chunks) < 1.8e6


@pytest.mark.parametrize("piece", [997, 100_000, 30_000_000])
def test_the_pieces_do_not_matter(corpus: bytes, piece: int) -> None:
    data = corpus[:9_000_000]
    assert cut(data, piece) == cut(data)


@pytest.mark.parametrize("change", ["insert", "remove", "replace"])
def test_a_change_leaves_all_chunks_but_those_around_it(corpus: bytes, change: str) -> None:
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
def test_what_has_no_content_to_cut_by_comes_back_too(data: bytes) -> None:
    assert b"".join(cut(data)) == data


def test_chunks_lie_once_for_all_datasets_of_an_organization_and_with_no_other() -> None:
    name = "ab" * 32
    assert chunk_uri("s3://hanzo-ml/datasets/d/1/x", name) == f"s3://hanzo-ml/datasets/_chunks/ab/{name}"
    assert chunk_uri("s3://hanzo-ml/datasets/@acme/d/1/x", name) == f"s3://hanzo-ml/datasets/@acme/_chunks/ab/{name}"
    with pytest.raises(BrokenArtifact):
        chunk_uri("s3://hanzo-models/m/v1", name)
