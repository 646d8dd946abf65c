"""The records of a version as they are read: line by line, each chunk verified, nothing of it kept."""

from collections.abc import Iterator

from recipes.schema import Artifact
from recipes.store import Store


def record_lines(store: Store, artifact: Artifact) -> Iterator[bytes]:
    """Every line of the records, with its newline, in the order of the version; tokens beside them are none.

    Raises:
        BrokenArtifact, FileNotFoundError: as `Store.pieces`.
    """
    for file in store.manifest(artifact).files:
        if not file.path.endswith(".jsonl"):
            continue
        rest = b""
        for piece in store.pieces(artifact.uri, file):
            *whole, rest = (rest + piece).split(b"\n")
            yield from (line + b"\n" for line in whole)
        if rest:
            yield rest
