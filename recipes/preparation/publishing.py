"""Upload finished parts, and write the manifests of the new version."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from pydantic import JsonValue

from recipes.contracts.job import Job
from recipes.preparation.plan import Plan, atomic_path
from recipes.preparation.shuffle_stage import HASH_COLUMNS, HASHES_FOLDER, PARTS_FOLDER, PartCounts, part_name
from recipes.preparation.split_assignment import SPLITS
from recipes.preparation.workers import Pods
from recipes.records.record_index import HashPairs, publish_record_index
from recipes.storage.artifact_store import Store, hash_file
from recipes.storage.manifest import Artifact, FileRecord, Manifest

DELIVERED_FOLDER = "delivered"
DATASET_ROLE = "dataset"
"""Role of the artifact with the records of all splits."""


def delivery_marker(plan: Plan, number: int) -> Path:
    """Return the marker of an uploaded part; it holds the part's file records."""
    return plan.work / DELIVERED_FOLDER / f"{number:05}.json"


def hashes_file(plan: Plan, parts: PartCounts, number: int) -> Path:
    split, name = part_name(parts, number)
    return plan.work / HASHES_FOLDER / split / f"{name}.npy"


def upload_parts(job: Job, store: Store, plan: Plan, parts: PartCounts, pods: Pods) -> None:
    """Upload this pod's parts to the version's location."""
    for number in range(*pods.unit_range(sum(parts), pods.rank)):
        if pods.is_published(delivery_marker(plan, number)):
            continue
        split, name = part_name(parts, number)
        files = []
        candidates = (plan.work / PARTS_FOLDER / split / f"{name}.{suffix}" for suffix in ("arrow", "jsonl"))
        for file in filter(Path.is_file, candidates):
            store.put_file(f"{job.outputs[split]}/{file.name}", file)
            files.append(FileRecord(path=file.name, sha256=hash_file(file), size=file.stat().st_size))
        with atomic_path(delivery_marker(plan, number)) as part:
            part.write_bytes(Manifest(kind="part", files=tuple(files)).to_bytes())
        pods.publish(hashes_file(plan, parts, number), delivery_marker(plan, number))


def select_hashes(hashes: Sequence[Path], *names: str) -> Iterator[HashPairs]:
    """Yield columns of the records' hashes, part by part."""
    wanted = [HASH_COLUMNS.index(name) for name in names]
    return (np.load(part)[:, wanted] for part in hashes)


def is_records_file(name: str) -> bool:
    """Return whether a file holds records, not their tokens."""
    return name.endswith(".jsonl")


class VersionPublisher:
    """Publishes the parts that all pods have uploaded as artifacts."""

    def __init__(self, job: Job, store: Store, plan: Plan, parts: PartCounts, pods: Pods) -> None:
        self._job, self._store, self._plan = job, store, plan
        self._files: dict[str, list[FileRecord]] = {role: [] for role in (*SPLITS, DATASET_ROLE)}
        self._hash_files: dict[str, list[Path]] = {role: [] for role in (*SPLITS, DATASET_ROLE)}
        every = range(sum(parts))
        pods.fetch(path for number in every for path in (delivery_marker(plan, number), hashes_file(plan, parts, number)))
        # Sorted by name, the order of reading a folder that holds all of them.
        for number in sorted(every, key=lambda number: part_name(parts, number)[1]):
            split, _ = part_name(parts, number)
            hashes = hashes_file(plan, parts, number)
            files = Manifest.model_validate_json(delivery_marker(plan, number).read_bytes()).files
            self._files[split] += files
            below = job.outputs[split].removeprefix(f"{job.outputs[DATASET_ROLE]}/")
            self._files[DATASET_ROLE] += [
                file.model_copy(update={"path": f"{below}/{file.path}"}) for file in files if is_records_file(file.path)
            ]
            for role in (split, DATASET_ROLE):
                self._hash_files[role].append(hashes)

    def publish(self, role: str, kind: str, facts: dict[str, JsonValue]) -> Artifact:
        """Commit the artifact of a split, or of all records, and index it.

        Records are indexed under their own hashes and those of their source records, so that both are found.
        """
        inputs = {"dataset": self._job.inputs["dataset"].digest}
        manifest = Manifest(kind=kind, files=tuple(self._files[role]), inputs=inputs, facts=facts)
        artifact = self._store.put_manifest(self._job.outputs[role], manifest)
        hashes = self._hash_files[role]
        publish_record_index(
            self._store, artifact, select_hashes(hashes, "said", "own"), select_hashes(hashes, "source", "said")
        )
        return artifact

    def content(self, extra_files: Iterable[FileRecord] = ()) -> str:
        """Return the SHA-256 of a version's content, to compare versions.

        Of the hashes of all files, tokens and `extra_files`.
        """
        hashes = [file.sha256 for files in (*(self._files[split] for split in SPLITS), extra_files) for file in files]
        return hashlib.sha256("".join(hashes).encode()).hexdigest()
