"""The program prepare: derive a dataset version by filtering, masking, tokenizing, splitting and shuffling.

Equal version and parameters give equal bytes on any number of processes (`hardware.cpu` of the job), and of pods (`pods` of
the job) that share only the object store. A pod's number follows the job file on the command line. Work that was done before
a kill is not repeated.
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
"""Version of the intermediate tables: work that an earlier release began in another format starts again.

Ranges in different formats must not be combined.
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
    """Prepare. Input: `dataset`. Outputs: `dataset` (all records), the splits, `rejected` and `features`.

    A split's folder holds its records as JSON lines and, if they are tokenized, the same records in the same order as Arrow
    files with the columns `recipes.preparation.tokenization.record_tokenizer.TOKEN_FIELDS`. It is below the dataset's
    folder, whose files are the JSON lines of all splits: each record is stored once.

    Args:
        rank: number of this pod, from 0, which has the result; None if this process does all work.

    Raises:
        BadConfiguration: the tokenizer is unknown, too few records are left, or an earlier release began the job.
    """
    refuse_other_rendering(job, store)
    parameters = PrepareParameters.model_validate(job.parameters)
    cache = Path(job.cache_dir)
    cache.mkdir(parents=True, exist_ok=True)
    count = 1 if rank is None else job.pods
    # The name excludes work of other jobs, and of other numbers of pods, in the same folder.
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
        with Workers(1) as loader:  # in its own process, which frees the loaded libraries before the work begins
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
    """Raise BadConfiguration if an earlier release began the job and would render its records differently."""
    columns = store.manifest(job.inputs["dataset"]).facts.get("columns")
    if job.rendering is Rendering.AS_STORED and not (isinstance(columns, dict) and not depends_on_rendering(columns)):
        raise BadConfiguration(
            f"job {job.id} was begun by an earlier release, which rendered records differently: submit the preparation again"
        )


def list_feature_files(store: Store, artifacts: Mapping[str, Artifact]) -> Sequence[FileRecord]:
    """Return the files that features are served from.

    Different ones make a different version of equal records.
    """
    return store.manifest(artifacts["features"]).files if "features" in artifacts else ()


def wait_for_result(job: Job, store: Store, exchange_uri: str) -> None:
    """Wait for the result in another pod, then delete the exchanged files.

    Each pod deletes them: a pod that restarted when the result was stored may have published files after the deletion.
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
    """Summarize a preparation in one line for users."""
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
    """Publish the splits, all records as a dataset, and the rejects, with their lineage.

    Tokenized records are stored as JSON and as tokens. Training memory-maps the tokens; preview, diff, trace, checks and
    downloads read the JSON, which tokens cannot replace: they lack what is after `max_length`, and all columns except texts.
    JSON was 103 of 238 MB for 136,482 instruction records (tokens 124, index 11). As a column next to the tokens it would
    need the same space, and every reader of lines would have to read Arrow.

    They are stored as files, not in chunks like uploads (`recipes.storage.locations`): a shuffle moves each changed record,
    so that hardly any chunk stays the same. For 40,000 records of 730 bytes, replacing 1 % in one place changed 100 % of
    chunks of 1 MiB, and 82 % (Arrow) to 93 % (JSON lines) of chunks of 64 KiB; a different split or no masking changed 100 %
    of both. Only in the order of the input (`shuffle_seed: null`) it was 27 to 30 %. With chunks, training from a folder
    would need a copy first, instead of reading the files in place.
    """
    # The location is a fact, so that equal data prepared under two names are two artifacts. With equal digests, lineage knew
    # only one location, and deleting that version removed the other one's proof, and that of its models.
    place = job.outputs[DATASET_ROLE]
    facts: dict[str, JsonValue] = {"parameters": plan.parameters.model_dump(mode="json"), "place": place}
    if plan.parameters.tokenize is not None:
        facts["tokenizer"] = read_frozen_tokenizer(plan.work / TOKENIZER_FOLDER).fingerprint
        facts["truncated"] = prepared.truncated  # of all splits; logged by training
    artifacts = {}
    for name in SPLITS:
        numbers = {"num_records": prepared.records[name], "leaked": prepared.leaked}
        artifacts[name] = delivery.publish(name, "split", {**facts, "split": name, **numbers})
        log_line(f"{name}: {pluralize(prepared.records[name], 'record')}")
    # In the manifest, which is immutable: it answers whether a model was trained on personal data.
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
