"""A lineage graph as the assets record it, without any training."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.contracts.job import Job, Program, StoreAddress
from recipes.records.fingerprint import encode_canonical_line
from recipes.records.record_index import fingerprint_line, publish_record_index
from recipes.split import split_dataset
from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Artifact
from resources.ingest.version_creation import create_version
from resources.lineage.edges import record_artifact
from resources.lineage.trace import Trace, TraceNode, Tracer, walk_nodes
from resources.metadata.database import Database
from resources.metadata.datasets import Datasets, DatasetVersion, new_id
from resources.metadata.jobs import Jobs
from resources.metadata.registry import deployments
from resources.metadata.registry.model_names import ModelKey
from resources.metadata.registry.version_lifecycle import Registry
from tests.support.resources.model_versions import registration

BUCKETS = {kind: f"hanzo-{kind}" for kind in ("datasets", "checkpoints", "models")}

SPLITS = ("train", "validation", "test")

Rows = Sequence[Mapping[str, Any]]


def rows(count: int, first: int = 0) -> list[dict[str, Any]]:
    return [{"instruction": f"What is number {n}?", "answer": f"It is {n}, naturally."} for n in range(first, first + count)]


def publish_index(store: Store, artifact: Artifact, lines: Iterable[bytes], origins: Sequence[int] | None = None) -> None:
    """Publish a record index for an artifact whose files are not chunked.

    `origins` has the hash of each record's source.
    """
    found = [fingerprint_line(line) for line in lines]
    records = np.array([(each.text, each.record) for each in found], np.uint64)
    made_of = None
    if origins is not None:
        made_of = [np.array([(origin, each.text) for origin, each in zip(origins, found, strict=True)], np.uint64)]
    publish_record_index(store, artifact, [records], made_of)


class World:
    """Build what the asset graph would, without training anything."""

    def __init__(self, database: Database, store: Store, folder: Path) -> None:
        self.database, self.store, self.folder = database, store, folder
        self.registry, self.jobs = Registry(database), Jobs(database)

    def create(self, rows: Rows | str, name: str = "d", organization: str = "default") -> DatasetVersion:
        text = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
        path = self.folder / "raw.jsonl"
        path.write_text(text, encoding="utf-8")
        version, _ = create_version(self.database, self.store, name=name, path=path, user="u", organization=organization)
        return version

    def split(self, version: DatasetVersion) -> dict[str, Artifact]:
        place = f"{version.storage_path}splits/x"
        job = Job(
            id=f"split-{version.id}",
            program=Program.SPLIT,
            inputs={"dataset": version.artifact},
            outputs={split: f"{place}/{split}" for split in SPLITS},
            result_uri=f"{place}/result.json",
            store=self.store.address,
            work_dir=str(self.folder / "work" / version.id),
            cache_dir=str(self.folder / "cache"),
        )
        artifacts = dict(split_dataset(job, self.store, Path(job.work_dir)).artifacts)
        with self.database.write() as connection:
            for artifact in artifacts.values():
                record_artifact(connection, artifact, self.store.manifest(artifact))
            stored = {name: {"artifact": artifact.model_dump()} for name, artifact in artifacts.items()}
            Datasets(self.database).set_splits(connection, version, stored)
        return artifacts

    def derive(
        self, source: DatasetVersion, made: Rows, of: Sequence[Mapping[str, Any]], name: str, **facts: Any
    ) -> DatasetVersion:
        """Create a version derived from another: `of` has the source of each record."""
        place = f"s3://hanzo-ml/datasets/{name}/1/"
        lines = [encode_canonical_line(row) for row in made]
        folder = self.folder / name
        folder.mkdir()
        folder.joinpath("train-00000.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
        inputs = {"dataset": source.artifact.digest}
        artifact = self.store.publish(folder, f"{place}records", "dataset", inputs=inputs, facts=facts)
        origins = [fingerprint_line(encode_canonical_line(row)).record for row in of]
        publish_index(self.store, artifact, lines, origins)
        version = replace(source, id=new_id(), name=name, storage_path=place, artifact=artifact, content_sha256=name)
        with self.database.write() as connection:
            record_artifact(connection, artifact, self.store.manifest(artifact))
            Datasets(self.database).add(connection, version)
        return version

    def publish(self, uri: str, kind: str, inputs: Mapping[str, Artifact], **facts: Any) -> Artifact:
        folder = self.folder / "made" / uri.removeprefix("s3://")
        folder.mkdir(parents=True)
        (folder / "weights").write_text(uri)
        digests = {role: artifact.digest for role, artifact in inputs.items()}
        artifact = self.store.publish(folder, uri, kind, inputs=digests, facts=facts)
        with self.database.write() as connection:
            record_artifact(connection, artifact, self.store.manifest(artifact))
        return artifact

    def run(self, id: str, version: DatasetVersion, splits: Mapping[str, Artifact], **more: Artifact) -> Artifact:
        """Complete a training run and return its adapter."""
        self.jobs.submit(name=id, config={}, user="u", organization=version.organization, id=id, status="running")
        used = {role: splits[role] for role in ("train", "validation")}
        run = self.publish(f"s3://hanzo-ml/runs/{id}/record", "run", used, run_id=id)
        adapter = self.publish(f"s3://hanzo-ml/runs/{id}/checkpoint-final/adapter", "adapter", {"run": run, **used, **more})
        with self.database.write() as connection:
            self.jobs.complete(connection, id, {"run": run, "adapter": adapter}, 1.0)
        self.publish(f"s3://hanzo-ml/runs/{id}/evaluation", "evaluation", {"test": splits["test"], "tuned": adapter})
        return adapter

    def model(self, name: str, run: str, adapter: Artifact, organization: str = "default") -> dict[str, Artifact]:
        """Register a version with its exports."""
        merged = self.publish(f"s3://hanzo-models/{name}/{run}/merged", "merged", {"adapter": adapter})
        gguf = self.publish(f"s3://hanzo-models/{name}/{run}/gguf", "gguf", {"merged": merged})
        with self.database.write() as connection:
            key = ModelKey(organization, name)
            version = self.registry.register(connection, key, registration(run), {"adapter": adapter})
            self.registry.add_artifacts(connection, version, {"merged": merged, "gguf": gguf})
        return {"merged": merged, "gguf": gguf}

    def deploy(self, name: str, version: int, promotion: int) -> None:
        with self.database.write() as connection:
            where = {"url": "http://engine", "sha256": "0" * 64}
            begun = deployments.begin_deployment(
                connection, ModelKey("default", name), version=version, promotion=promotion, **where
            )
            deployments.mark_serving(connection, begun)

    def trace(self, row: Mapping[str, Any], organization: str = "default") -> Trace:
        return Tracer(self.database, self.store, organization).trace(row)


@pytest.fixture
def small(sqlite_url: str, tmp_path: Path) -> Iterator[World]:
    """Return a world on a folder and SQLite, for tests independent of them."""
    database = Database(sqlite_url)
    yield World(database, Store(StoreAddress(root=(tmp_path / "objects").as_uri(), buckets=BUCKETS)), tmp_path)
    database.close()


def node(trace: Trace, name: str) -> TraceNode:
    return next(node for node in walk_nodes(trace.reached) if node.name == name)
