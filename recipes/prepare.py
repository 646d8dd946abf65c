"""The program prepare: a dataset version -> another, filtered, masked, tokenized, split and shuffled (rows C1-C4, C7, D5).

The same version and parameters give the same bytes on any number of processes (`hardware.cpu` of the job). What was done
before a kill is not done again.
"""

import hashlib
import os
import shutil
from pathlib import Path

import numpy as np
from pydantic import JsonValue

from recipes.assignment import SPLITS
from recipes.parameters import PrepareParameters
from recipes.preparation.encoding import TOKENIZER_FOLDER
from recipes.preparation.ordering import KNOWN_BY, PARTS
from recipes.preparation.pipeline import REJECTED, Prepared, run
from recipes.preparation.plan import PART_BYTES, RANGE_BYTES, Plan, cut
from recipes.preparation.tokenizer import freeze_alone
from recipes.preparation.tokenizer_files import read_frozen
from recipes.preparation.workers import Workers
from recipes.record_index import publish_hashes
from recipes.runner import main, say
from recipes.schema import Artifact, Job, Result
from recipes.store import Store


def prepare(job: Job, store: Store, work: Path, *, range_bytes: int = RANGE_BYTES, part_bytes: int = PART_BYTES) -> Result:
    """Prepare. Input: `dataset`. Outputs: `dataset`, all records; `train`, `validation`, `test`; `rejected`.

    A split's folder holds its records as JSON lines and, where they were tokenized, the same records in the same order as
    Arrow files with the columns of `recipes.preparation.tokens.TOKEN_FIELDS`.

    Raises:
        BadConfiguration: no such tokenizer, or no records are left, or too few to split.
    """
    parameters = PrepareParameters.model_validate(job.parameters)
    cache = Path(job.cache_dir)
    cache.mkdir(parents=True, exist_ok=True)
    files = sorted(store.fetch(job.inputs["dataset"], cache).glob("*.jsonl"))
    # Another job's files in the same folder are no half-done work of this one.
    place = work / job.work_digest[:16]
    plan = Plan(work=place, ranges=cut(files, range_bytes), parameters=parameters, part_bytes=part_bytes)
    if parameters.tokenize is not None:
        with Workers(1) as loader:  # in a process of its own: what it loads is given back before the work begins
            list(loader.run(freeze_alone, [(parameters.tokenize, job.store, cache, place / TOKENIZER_FOLDER)]))
    with Workers(job.hardware.cpu or os.cpu_count() or 1) as workers:
        prepared = run(plan, workers)
    say(describe(prepared))
    artifacts = publish(job, store, plan, prepared)
    content = content_of(together(plan))
    shutil.rmtree(place)
    return Result(
        work_digest=job.work_digest,
        artifacts=artifacts,
        metrics={name: float(count) for name, count in prepared.records.items()},
        facts={**facts_of(prepared), "content_sha256": content},
    )


def describe(prepared: Prepared) -> str:
    """One line for people."""
    kept = ", ".join(f"{name} {count}" for name, count in prepared.records.items())
    gone = ", ".join(f"{count} {reason}" for reason, count in prepared.rejected.items()) or "none"
    hidden = ", ".join(f"{count} {kind}" for kind, count in prepared.masked.items()) or "none"
    return f"{prepared.lines} lines -> {kept}; rejected: {gone}; masked: {hidden}"


def facts_of(prepared: Prepared) -> dict[str, JsonValue]:
    return {
        "rejected": dict(prepared.rejected),
        "masked": dict(prepared.masked),
        "oversampled": dict(prepared.oversampled),
        "leaked": prepared.leaked,
    }


def publish(job: Job, store: Store, plan: Plan, prepared: Prepared) -> dict[str, Artifact]:
    """The parts of each split, all records as one dataset, and the rejects; each says what it was made from, and how.

    They lie as files, and not in chunks as what was uploaded does (`recipes.chunks`): a shuffle puts each changed record
    somewhere else, so that hardly a chunk stays as it was. Of 40,000 records of 730 bytes, 1 % replaced in one place made
    100 % of all chunks of 1 MiB new, and 82 % (Arrow) to 93 % (JSON lines) of chunks of 64 KiB; another split or no masking
    100 % of both. Only in the order of the input (`shuffle_seed: null`) it was 27 to 30 %. For that, whoever trains from a
    folder would have to put a copy together first, instead of reading the files where they lie.
    """
    inputs = {"dataset": job.inputs["dataset"].digest}
    facts: dict[str, JsonValue] = {"parameters": plan.parameters.model_dump(mode="json")}
    if plan.parameters.tokenize is not None:
        facts["tokenizer"] = read_frozen(plan.work / TOKENIZER_FOLDER).fingerprint
    artifacts = {}
    for name in SPLITS:
        counted = {"num_records": prepared.records[name], "leaked": prepared.leaked}
        said: dict[str, JsonValue] = {**facts, "split": name, **counted}
        artifacts[name] = store.publish(plan.work / PARTS / name, job.outputs[name], "split", inputs=inputs, facts=said)
        index(store, artifacts[name], plan, plan.work / PARTS / name)
        say(f"{name}: {prepared.records[name]} records")
    # In the manifest, which nobody can edit: it answers whether a model was trained on personal data.
    masked: dict[str, JsonValue] = {"masked": dict(prepared.masked)} if plan.parameters.augment.mask_pii else {}
    total = sum(prepared.records.values())
    everything = together(plan)
    artifacts["dataset"] = store.publish(
        everything, job.outputs["dataset"], "dataset", inputs=inputs, facts={**facts, "num_records": total, **masked}
    )
    index(store, artifacts["dataset"], plan, everything)
    rejected = plan.work / "rejected"
    rejected.mkdir(exist_ok=True)
    shutil.copy(plan.work / REJECTED, rejected)
    artifacts["rejected"] = store.publish(rejected, job.outputs["rejected"], "rejected", inputs=inputs, facts=facts)
    return artifacts


def index(store: Store, artifact: Artifact, plan: Plan, folder: Path) -> None:
    """Index the records in `folder` by themselves and by what they were made of, so that those are found in them too."""
    known = {file.stem: file for file in plan.work.joinpath(KNOWN_BY).rglob("*.npy")}
    hashes = np.concatenate([np.load(known[file.stem]) for file in sorted(folder.glob("*.jsonl"))])
    sources, records, texts = (np.ascontiguousarray(column) for column in hashes.T)
    publish_hashes(store, artifact, texts, records, plan.work / "index" / artifact.digest, sources)


def together(plan: Plan) -> Path:
    """A folder with the records of all splits; the files are the same ones, not copies."""
    folder = plan.work / "together"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for file in plan.work.joinpath(PARTS).rglob("*.jsonl"):
        os.link(file, folder / file.name)
    return folder


def content_of(folder: Path) -> str:
    """SHA-256 of all records, one after the other: of a version, it tells whether another holds the same."""
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        with file.open("rb") as lines:
            while piece := lines.read(1 << 20):
                digest.update(piece)
    return digest.hexdigest()


if __name__ == "__main__":
    main(prepare)
