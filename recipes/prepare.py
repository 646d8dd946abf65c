"""The program prepare: a dataset version -> another, filtered, masked, tokenized, split and shuffled (rows C1-C4, C7, D5).

The same version and parameters give the same bytes on any number of processes (`hardware.cpu` of the job), and of pods that
share nothing but the object store (`pods` of the job; each is told its number behind the job file). What was done before a
kill is not done again.
"""

import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from pydantic import JsonValue, ValidationError

from recipes.contracts.job import BadConfiguration, Job, Result
from recipes.contracts.parameters import PrepareParameters
from recipes.contracts.quantities import pluralize
from recipes.contracts.rendering import Rendering
from recipes.machine import usable_cores
from recipes.preparation import feature_stages
from recipes.preparation.encode_stage import TOKENIZER_FOLDER
from recipes.preparation.pipeline import REJECTED_FILE, PreparationSummary, run_pipeline
from recipes.preparation.plan import PART_BYTES, RANGE_BYTES, Plan, cut_ranges
from recipes.preparation.publishing import DATASET_ROLE, VersionPublisher, upload_parts
from recipes.preparation.shuffle_plan import MERGE_FAN_IN
from recipes.preparation.source import Source
from recipes.preparation.split_assignment import SPLITS
from recipes.preparation.tokenization.frozen_tokenizer import export_without_torch, read_frozen_tokenizer
from recipes.preparation.workers import POLL_SECONDS, MultiplePods, Pods, ResultAlreadyPublished, Workers
from recipes.records.conversation import describe_unread
from recipes.records.disk_partitions import BUFFER_BYTES
from recipes.records.record_layouts import depends_on_rendering
from recipes.runner import log_line, main
from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Artifact, FileRecord

TABLES_VERSION = 4
"""Counts up with what stands in the half-done work's tables: what an earlier release began otherwise is begun anew.

Ranges that it had read, and others that were read now, would be put together into what neither of the two makes.
"""


def prepare(
    job: Job,
    store: Store,
    work: Path,
    *,
    rank: int | None = None,
    range_bytes: int = RANGE_BYTES,
    part_bytes: int = PART_BYTES,
    fan: int = MERGE_FAN_IN,
    held_bytes: int = BUFFER_BYTES,
) -> Result | None:
    """Prepare. Input: `dataset`. Outputs: `dataset`, all records; `train`, `validation`, `test`; `rejected`; `features`.

    A split's folder holds its records as JSON lines and, where they were tokenized, the same records in the same order as
    Arrow files with the columns of `recipes.preparation.tokenization.record_tokenizer.TOKEN_FIELDS`. It lies below the
    dataset's, whose files are the JSON lines of all splits: each record is stored once.

    Args:
        rank: which of the job's pods this is, from 0, whose result it is; none: this process does all of it.

    Raises:
        BadConfiguration: no such tokenizer, or no records are left, or too few to split; or it was begun in another way.
    """
    refuse_other_rendering(job, store)
    parameters = PrepareParameters.model_validate(job.parameters)
    cache = Path(job.cache_dir)
    cache.mkdir(parents=True, exist_ok=True)
    count = 1 if rank is None else job.pods
    # Another job's files in the same folder, or those of another number of pods, are no half-done work of this one.
    name = f"{job.work_digest[:16]}-{rank or 0}-of-{count}-{TABLES_VERSION}"
    exchange_uri = f"{job.result_uri.rpartition('/')[0]}/_pods/{job.work_digest[:16]}-of-{count}-{TABLES_VERSION}"
    has_ended = partial(has_result, job, store)
    pods = Pods() if rank is None or count == 1 else MultiplePods(store, exchange_uri, work / name, rank, count, has_ended)
    if pods.count > 1 and has_ended():
        wait_for_result(job, store, exchange_uri)
        return None
    source = Source(store, job.inputs["dataset"], cache)
    ranges = cut_ranges(source.files.values(), range_bytes)
    plan = Plan(
        work=work / name, ranges=ranges, parameters=parameters, part_bytes=part_bytes, fan=fan, held_bytes=held_bytes
    )
    if parameters.tokenize is not None:
        with Workers(1) as loader:  # in a process of its own: what it loads is given back before the work begins
            list(
                loader.run(
                    export_without_torch,
                    [(parameters.tokenize, job.store, cache, plan.work / TOKENIZER_FOLDER)],
                )
            )
    try:
        with Workers(usable_cores(job.hardware.cpu)) as workers:
            parts, prepared = run_pipeline(plan, source, workers, pods)
        upload_parts(job, store, plan, parts, pods)
        delivery = VersionPublisher(job, store, plan, parts, pods) if prepared else None
    except ResultAlreadyPublished:
        prepared = delivery = None
    if prepared is None or delivery is None:
        wait_for_result(job, store, exchange_uri)
        return None
    log_line(describe_prepared(prepared))
    artifacts = publish_artifacts(job, store, plan, prepared, delivery)
    shutil.rmtree(plan.work)
    return Result(
        work_digest=job.work_digest,
        artifacts=artifacts,
        metrics={name: float(count) for name, count in prepared.records.items()},
        facts={**build_facts(prepared), "content_sha256": delivery.content(list_feature_files(store, artifacts))},
    )


def refuse_other_rendering(job: Job, store: Store) -> None:
    """Raises BadConfiguration: an earlier release began the job, and would have made something else of its records."""
    columns = store.manifest(job.inputs["dataset"]).facts.get("columns")
    if job.rendering is Rendering.AS_STORED and not (isinstance(columns, dict) and not depends_on_rendering(columns)):
        raise BadConfiguration(
            f"job {job.id} was begun by an earlier release, which read and rendered its records in another way: submit the "
            "preparation again"
        )


def list_feature_files(store: Store, artifacts: Mapping[str, Artifact]) -> Sequence[FileRecord]:
    """The files that a version's features are served by: other ones make another version of the same records."""
    return store.manifest(artifacts["features"]).files if "features" in artifacts else ()


def wait_for_result(job: Job, store: Store, exchange_uri: str) -> None:
    """End of a pod that has not the result: once that is there, nobody needs any more what the pods gave each other.

    Each removes it: one that was started again as the result was stored has given some after the others had removed it.
    """
    if not has_result(job, store):
        log_line("this pod's part is done: waiting for the first pod's result")
    while not has_result(job, store):
        time.sleep(POLL_SECONDS)
    store.delete(exchange_uri)


def has_result(job: Job, store: Store) -> bool:
    try:
        return Result.model_validate_json(store.get_bytes(job.result_uri)).work_digest == job.work_digest
    except (FileNotFoundError, ValidationError):
        return False


def describe_prepared(prepared: PreparationSummary) -> str:
    """One line for people."""
    kept = ", ".join(f"{name} {count}" for name, count in prepared.records.items())
    gone = ", ".join(f"{count} {reason}" for reason, count in prepared.rejected.items()) or "none"
    hidden = ", ".join(f"{count} {kind}" for kind, count in prepared.masked.items()) or "none"
    done = f"rejected: {gone}; masked: {hidden}; cut at max_length: {prepared.truncated}"
    unread = f"; not rendered, as the serving engine drops it: {describe_unread(prepared.unread)}" if prepared.unread else ""
    return f"{pluralize(prepared.lines, 'line')} -> {kept}; {done}{unread}"


def build_facts(prepared: PreparationSummary) -> dict[str, JsonValue]:
    return {
        "rejected": dict(prepared.rejected),
        "masked": dict(prepared.masked),
        "oversampled": dict(prepared.oversampled),
        "leaked": prepared.leaked,
        "truncated": prepared.truncated,
        "retyped": list(prepared.retyped),
        "filled": dict(prepared.filled),
        **({"unread": dict(prepared.unread)} if prepared.unread else {}),
    }


def publish_artifacts(
    job: Job, store: Store, plan: Plan, prepared: PreparationSummary, delivery: VersionPublisher
) -> dict[str, Artifact]:
    """The parts of each split, all records as one dataset, and the rejects; each says what it was made from, and how.

    A tokenized record is there as JSON and as tokens. Training reads these where they lie; preview, diff, trace, checks and
    whoever downloads a version read the JSON, which no tokens give back: what stood behind `max_length`, and all columns but
    the texts. It was 103 MB of the 238 of 136,482 records of instructions (tokens 124, index 11), and would be as many as a
    column beside the tokens, where every reader of lines would have to know Arrow.

    They lie as files, and not in chunks as what was uploaded does (`recipes.storage.locations`): a shuffle puts each changed
    record somewhere else, so that hardly a chunk stays as it was. Of 40,000 records of 730 bytes, 1 % replaced in one place
    made 100 % of all chunks of 1 MiB new, and 82 % (Arrow) to 93 % (JSON lines) of chunks of 64 KiB; another split or no
    masking 100 % of both. Only in the order of the input (`shuffle_seed: null`) it was 27 to 30 %. For that, whoever trains
    from a folder would have to put a copy together first, instead of reading the files where they lie.
    """
    # Where they lie makes the same, prepared under two names, two artifacts: of two with one digest lineage knew one place,
    # and with the version at that place went what the other one, and its models, are proved by.
    place = job.outputs[DATASET_ROLE]
    facts: dict[str, JsonValue] = {"parameters": plan.parameters.model_dump(mode="json"), "place": place}
    if plan.parameters.tokenize is not None:
        facts["tokenizer"] = read_frozen_tokenizer(plan.work / TOKENIZER_FOLDER).fingerprint
        facts["truncated"] = prepared.truncated  # of all splits: told where they are trained on
    artifacts = {}
    for name in SPLITS:
        numbers = {"num_records": prepared.records[name], "leaked": prepared.leaked}
        artifacts[name] = delivery.publish(name, "split", {**facts, "split": name, **numbers})
        log_line(f"{name}: {pluralize(prepared.records[name], 'record')}")
    # In the manifest, which nobody can edit: it answers whether a model was trained on personal data.
    masked: dict[str, JsonValue] = {"masked": dict(prepared.masked)} if plan.parameters.augment.mask_pii else {}
    total = sum(prepared.records.values())
    artifacts[DATASET_ROLE] = delivery.publish(DATASET_ROLE, "dataset", {**facts, "num_records": total, **masked})
    rejected = plan.work / "rejected"
    rejected.mkdir(exist_ok=True)
    shutil.copy(plan.work / REJECTED_FILE, rejected)
    inputs = {"dataset": job.inputs["dataset"].digest}
    if plan.parameters.features is not None:
        folder, place = plan.work / feature_stages.FEATURES_FOLDER, job.outputs["features"]
        artifacts["features"] = store.publish(folder, place, "features", inputs=inputs, facts=facts)
    artifacts["rejected"] = store.publish(rejected, job.outputs["rejected"], "rejected", inputs=inputs, facts=facts)
    return artifacts


if __name__ == "__main__":
    main(partial(prepare, rank=int(sys.argv[2]) if len(sys.argv) > 2 else None))
