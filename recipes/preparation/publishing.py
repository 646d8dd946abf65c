"""Finished parts on their way to where the version lies: each pod delivers its own, the first one writes the manifests."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from pydantic import JsonValue

from recipes.contracts.job import Job
from recipes.preparation.plan import Plan, written
from recipes.preparation.pods import Pods
from recipes.preparation.shuffle_stage import HASHES, KNOWN_BY, PARTS, Parts, name_of
from recipes.preparation.split_assignment import SPLITS
from recipes.records.record_index import Pairs, publish_hashes
from recipes.storage.artifact_store import Store, sha256_of
from recipes.storage.manifest import Artifact, FileRecord, Manifest

DELIVERED = "delivered"
TOGETHER = "dataset"
"""Role of all records of all splits."""


def delivered(plan: Plan, number: int) -> Path:
    """Left when a part is in the store: its files as a manifest has them."""
    return plan.work / DELIVERED / f"{number:05}.json"


def known_by(plan: Plan, parts: Parts, number: int) -> Path:
    split, name = name_of(parts, number)
    return plan.work / KNOWN_BY / split / f"{name}.npy"


def deliver(job: Job, store: Store, plan: Plan, parts: Parts, pods: Pods) -> None:
    """Put the parts of this pod where the version will lie, each in its split."""
    for number in range(*pods.run_of(sum(parts), pods.rank)):
        if pods.has(delivered(plan, number)):
            continue
        split, name = name_of(parts, number)
        files = []
        written_files = (plan.work / PARTS / split / f"{name}.{suffix}" for suffix in ("arrow", "jsonl"))
        for file in filter(Path.is_file, written_files):
            store.put_file(f"{job.outputs[split]}/{file.name}", file)
            files.append(FileRecord(path=file.name, sha256=sha256_of(file), size=file.stat().st_size))
        with written(delivered(plan, number)) as part:
            part.write_bytes(Manifest(kind="part", files=tuple(files)).to_bytes())
        pods.give(known_by(plan, parts, number), delivered(plan, number))


def columns(known: Sequence[Path], *names: str) -> Iterator[Pairs]:
    """Some of the hashes that records are known by: those of one part after the other."""
    wanted = [HASHES.index(name) for name in names]
    return (np.load(part)[:, wanted] for part in known)


def is_records(name: str) -> bool:
    """Not the tokens beside them."""
    return name.endswith(".jsonl")


class Delivery:
    """All parts, delivered by whichever pods."""

    def __init__(self, job: Job, store: Store, plan: Plan, parts: Parts, pods: Pods) -> None:
        self._job, self._store, self._plan = job, store, plan
        self._files: dict[str, list[FileRecord]] = {role: [] for role in (*SPLITS, TOGETHER)}
        self._known_by: dict[str, list[Path]] = {role: [] for role in (*SPLITS, TOGETHER)}
        every = range(sum(parts))
        pods.take(path for number in every for path in (delivered(plan, number), known_by(plan, parts, number)))
        # In the order of their names, as a folder of all of them would be read.
        for number in sorted(every, key=lambda number: name_of(parts, number)[1]):
            split, _ = name_of(parts, number)
            known = known_by(plan, parts, number)
            files = Manifest.model_validate_json(delivered(plan, number).read_bytes()).files
            self._files[split] += files
            below = job.outputs[split].removeprefix(f"{job.outputs[TOGETHER]}/")
            self._files[TOGETHER] += [
                file.model_copy(update={"path": f"{below}/{file.path}"}) for file in files if is_records(file.path)
            ]
            for role in (split, TOGETHER):
                self._known_by[role].append(known)

    def publish(self, role: str, kind: str, facts: dict[str, JsonValue]) -> Artifact:
        """Make an artifact of a split, or of all records, and index it.

        Records are known by themselves and by what they were made of, so that those are found in it too.
        """
        inputs = {"dataset": self._job.inputs["dataset"].digest}
        manifest = Manifest(kind=kind, files=tuple(self._files[role]), inputs=inputs, facts=facts)
        artifact = self._store.put_manifest(self._job.outputs[role], manifest)
        known = self._known_by[role]
        publish_hashes(self._store, artifact, columns(known, "said", "own"), columns(known, "source", "said"))
        return artifact

    def content(self, beside: Iterable[FileRecord] = ()) -> str:
        """Of a version, tells whether another holds the same: the SHA-256 of those of all files, of tokens too, and of those
        `beside` them."""
        hashes = [file.sha256 for files in (*(self._files[split] for split in SPLITS), beside) for file in files]
        return hashlib.sha256("".join(hashes).encode()).hexdigest()
