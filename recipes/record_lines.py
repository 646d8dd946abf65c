"""The records of an artifact as they are read: line by line where they lie, verified, nothing of it kept."""

import hashlib
from collections.abc import Iterator

from recipes.addresses import BrokenArtifact
from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Artifact, FileRecord


def record_lines(store: Store, artifact: Artifact) -> Iterator[bytes]:
    """Every line of the records, with its newline, in the order of the artifact; tokens beside them are none.

    Raises:
        BrokenArtifact: as `Store.pieces`; of a file that does not lie in chunks, once its last line was given.
        FileNotFoundError: as `Store.pieces`.
    """
    for file in store.manifest(artifact).files:
        if not file.path.endswith(".jsonl"):
            continue
        rest = b""
        for piece in verified(store, artifact, file):
            *whole, rest = (rest + piece).split(b"\n")
            yield from (line + b"\n" for line in whole)
        if rest:
            yield rest


def verified(store: Store, artifact: Artifact, file: FileRecord) -> Iterator[bytes]:
    """A file's bytes. Those of chunks, and of lines that were chosen of such, are verified before they come."""
    if file.chunks or file.selection:
        yield from store.pieces(artifact.uri, file)
        return
    digest = hashlib.sha256()
    for piece in store.pieces(artifact.uri, file):
        digest.update(piece)
        yield piece
    if (found := digest.hexdigest()) != file.sha256:
        raise BrokenArtifact(f"{artifact.uri}/{file.path} has SHA-256 {found}, recorded is {file.sha256}")
