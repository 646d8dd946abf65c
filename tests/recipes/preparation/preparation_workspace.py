"""A store with one dataset, and the program prepare run on it."""

import hashlib
import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from recipes.contracts.job import Hardware, Job, Program, Result, StoreAddress
from recipes.prepare import prepare
from recipes.storage.artifact_store import Store
from recipes.storage.locations import chunk_uri
from recipes.storage.manifest import Artifact, Chunk, FileRecord, Manifest, canonical_json
from resources.datasets.prepared_versions import output_uris
from tests.recipes.tiny_model import make_tokenizer

TEXT = (
    "the harbour keeps many ships and a lighthouse where every keeper counts the names of people that pass through the "
    "night of winter while the lamp burns and nobody sleeps before the morning comes over the water"
)
WORDS = TEXT.split()
BUCKETS = {kind: f"hanzo-{kind}" for kind in ("datasets", "checkpoints", "models")}


def questions(count: int, seed: int = 1) -> list[dict[str, Any]]:
    """Generate records of English words with a long tail of lengths."""
    draw = random.Random(seed)
    return [
        {
            "instruction": " ".join(draw.choices(WORDS, k=draw.randint(3, 12))) + f" {number}?",
            "answer": " ".join(draw.choices(WORDS, k=2 + int(draw.lognormvariate(2, 1)))) + ".",
        }
        for number in range(count)
    ]


def in_chunks(store: Store, uri: str, file: Path, size: int) -> Artifact:
    """Publish a dataset of one file, split into chunks as an upload would be."""
    data = file.read_bytes()
    chunks = []
    for piece in (data[start : start + size] for start in range(0, len(data), size)):
        chunks.append(Chunk(sha256=hashlib.sha256(piece).hexdigest(), size=len(piece)))
        store.put_bytes(chunk_uri(uri, chunks[-1].sha256), piece)
    record = FileRecord(path=file.name, sha256=sha256(file), size=len(data), chunks=tuple(chunks))
    return store.put_manifest(uri, Manifest(kind="dataset", files=(record,)))


class Place:
    """One dataset of JSON lines, given as rows or raw lines; `units` sets unit sizes."""

    def __init__(
        self,
        folder: Path,
        rows: Iterable[dict[str, Any] | bytes],
        units: Mapping[str, int] | None = None,
        store: Store | None = None,
        chunk_bytes: int | None = None,
    ) -> None:
        self.folder = folder
        self.units = units or {}
        self.store = store or Store(StoreAddress(root=(folder / "objects").as_uri(), buckets=BUCKETS))
        raw = folder / "raw"
        raw.mkdir(parents=True)
        with (raw / "records.jsonl").open("wb") as file:
            file.writelines((row if isinstance(row, bytes) else canonical_json(row)) + b"\n" for row in rows)
        uri = "s3://hanzo-ml/datasets/d/1/records"
        if chunk_bytes is None:
            self.dataset = self.store.publish(raw, uri, "dataset")
        else:
            self.dataset = in_chunks(self.store, uri, raw / "records.jsonl", chunk_bytes)

    def tokenize(self, **changed: Any) -> dict[str, Any]:
        """Return parameters for a tiny tokenizer."""
        folder = self.folder / "tokenizer"
        if not folder.is_dir():
            make_tokenizer().save_pretrained(folder)
        return {"tokenizer": folder.as_uri(), **changed}

    def job(self, parameters: dict[str, Any], workers: int = 1) -> Job:
        return Job(
            id="prepare",
            program=Program.PREPARE,
            inputs={"dataset": self.dataset},
            parameters=parameters,
            outputs=output_uris("s3://hanzo-ml/datasets/d/prepared", with_features="features" in parameters),
            result_uri="s3://hanzo-ml/datasets/d/prepared/result.json",
            store=self.store.address,
            work_dir=str(self.folder / "work"),
            cache_dir=str(self.folder / "cache"),
            hardware=Hardware(cpu=workers),
        )

    def prepare(self, parameters: dict[str, Any], workers: int = 1) -> Result:
        result = prepare(self.job(parameters, workers), self.store, self.folder / "work", **self.units)
        assert result is not None
        return result

    def files(self, result: Result) -> dict[str, str]:
        """Return the SHA-256 of every output file."""
        return {
            f"{role}/{file.path}": file.sha256
            for role, artifact in result.artifacts.items()
            for file in self.store.manifest(artifact).files
        }

    def rows(self, result: Result, role: str = "dataset") -> list[dict[str, Any]]:
        folder = self.store.fetch(result.artifacts[role], self.folder / "cache")
        return [json.loads(line) for file in sorted(folder.rglob("*.jsonl")) for line in file.read_bytes().splitlines()]


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
