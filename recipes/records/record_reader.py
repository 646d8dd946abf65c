"""Read records from JSON lines, and normalize texts for comparison."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.contracts.job import BadConfiguration
from recipes.records.conversation import UnfitRecord, read_weight
from recipes.records.record_layouts import KEY_COLUMN, LAYOUT_KEYS, Layout, detect_layout, read_instruction, read_question
from recipes.storage.artifact_store import Store
from recipes.storage.locations import BrokenArtifact
from recipes.storage.manifest import Artifact, FileRecord

# Stream an artifact's records line by line from the store, verified, without keeping them.


def iterate_record_lines(store: Store, artifact: Artifact) -> Iterator[bytes]:
    """Yield every record line with its newline, in the artifact's order; token files are skipped.

    Raises:
        BrokenArtifact: as in `Store.pieces`; for a file without chunks, only after its last line.
        FileNotFoundError: as in `Store.pieces`.
    """
    for file in store.manifest(artifact).files:
        if not file.path.endswith(".jsonl"):
            continue
        rest = b""
        for piece in read_verified(store, artifact, file):
            *whole, rest = (rest + piece).split(b"\n")
            yield from (line + b"\n" for line in whole)
        if rest:
            yield rest


def read_verified(store: Store, artifact: Artifact, file: FileRecord) -> Iterator[bytes]:
    """Yield a file's bytes.

    Chunks, and lines selected from them, are verified before they are yielded.
    """
    if file.chunks or file.selection:
        yield from store.pieces(artifact.uri, file)
        return
    digest = hashlib.sha256()
    for piece in store.pieces(artifact.uri, file):
        digest.update(piece)
        yield piece
    if (found := digest.hexdigest()) != file.sha256:
        raise BrokenArtifact(f"{artifact.uri}/{file.path} has SHA-256 {found}, recorded is {file.sha256}")


@dataclass(frozen=True)
class Record:
    """A record of any layout."""

    row: Mapping[str, Any]
    layout: Layout

    @property
    def instruction(self) -> str:
        """The question."""
        return read_instruction(self.row) if self.layout is Layout.INSTRUCTION else read_question(self.row, self.layout)

    @property
    def answer(self) -> str:
        """The expected answer: a conversation's last learned turn, or a pair's chosen answer."""
        if self.layout is Layout.MESSAGES:
            turns = [message for message in self.row["messages"] if message["role"] == "assistant"]
            learned = [message for number, message in enumerate(turns, start=1) if read_weight(message, number)]
            return str(learned[-1].get("content") or "")
        return str(self.row[LAYOUT_KEYS[self.layout][min(1, len(LAYOUT_KEYS[self.layout]) - 1)]])

    @property
    def key(self) -> str:
        """The text by which an answer is scored, converted from any JSON value.

        By default the answer itself.
        """
        key = self.row.get(KEY_COLUMN)
        return self.answer if key is None or str(key).strip() == "" else str(key)


def parse_record(row: Mapping[str, Any]) -> Record:
    """Parse a record. Raises recipes.records.record_layouts.UnfitRecord if it has no trainable layout."""
    return Record(row, detect_layout(row))


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield one row per line.

    Only a newline ends a line: JSON text may contain other separators of `splitlines`.
    """
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                yield json.loads(line)


def read_records(folder: Path) -> list[Record]:
    """Read all records of a split.

    Raises:
        BadConfiguration: a record has no trainable layout; the message has its file and line.
    """
    return list(iterate_records(folder))


def iterate_records(folder: Path) -> Iterator[Record]:
    """Like `read_records`, as an iterator."""
    for file in sorted(folder.glob("*.jsonl")):
        for line, row in enumerate(read_json_lines(file), start=1):
            try:
                yield parse_record(row)
            except UnfitRecord as problem:
                raise BadConfiguration(f"{file.name}, line {line}: the record {problem}") from None


def normalize_text(text: str) -> str:
    """Normalize text for comparison: lower case, words only."""
    return " ".join(re.findall(r"\w+", text.lower()))
