"""Read records from JSON lines, and compare answers to them."""

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

# The records of an artifact as they are read: line by line where they lie, verified, nothing of it kept.


def iterate_record_lines(store: Store, artifact: Artifact) -> Iterator[bytes]:
    """Every line of the records, with its newline, in the order of the artifact; tokens beside them are none.

    Raises:
        BrokenArtifact: as `Store.pieces`; of a file that does not lie in chunks, once its last line was given.
        FileNotFoundError: as `Store.pieces`.
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


@dataclass(frozen=True)
class Record:
    """One example, of any layout."""

    row: Mapping[str, Any]
    layout: Layout

    @property
    def instruction(self) -> str:
        """What is asked."""
        return read_instruction(self.row) if self.layout is Layout.INSTRUCTION else read_question(self.row, self.layout)

    @property
    def answer(self) -> str:
        """What should be answered: of a conversation, the last turn that is learned; of a pair, the chosen one."""
        if self.layout is Layout.MESSAGES:
            turns = [message for message in self.row["messages"] if message["role"] == "assistant"]
            learned = [message for number, message in enumerate(turns, start=1) if read_weight(message, number)]
            return str(learned[-1].get("content") or "")
        return str(self.row[LAYOUT_KEYS[self.layout][min(1, len(LAYOUT_KEYS[self.layout]) - 1)]])

    @property
    def key(self) -> str:
        """The word by which an answer is judged, of any JSON value, such as a number; without one it is the answer."""
        key = self.row.get(KEY_COLUMN)
        return self.answer if key is None or str(key).strip() == "" else str(key)


def parse_record(row: Mapping[str, Any]) -> Record:
    """Raises recipes.records.record_layouts.UnfitRecord: the row has no layout that a model could be trained on."""
    return Record(row, detect_layout(row))


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """One row a line. Only a newline ends one: JSON texts may hold the other separators that `splitlines` knows."""
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                yield json.loads(line)


def read_records(folder: Path) -> list[Record]:
    """All records of a split.

    Raises:
        BadConfiguration: one has no layout that a model could be trained on; the message names its file and line.
    """
    return list(iterate_records(folder))


def iterate_records(folder: Path) -> Iterator[Record]:
    """As `read_records`, without holding them."""
    for file in sorted(folder.glob("*.jsonl")):
        for line, row in enumerate(read_json_lines(file), start=1):
            try:
                yield parse_record(row)
            except UnfitRecord as problem:
                raise BadConfiguration(f"{file.name}, line {line}: the record {problem}") from None


def normalize_text(text: str) -> str:
    """Lower case, words only: the form in which texts are compared."""
    return " ".join(re.findall(r"\w+", text.lower()))
