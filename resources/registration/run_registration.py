"""Register a run, or its final checkpoint, as a model version."""

import json
import re
from collections.abc import Mapping, Sequence

from recipes.contracts.results import find_trained_role
from recipes.storage import uris
from recipes.storage.artifact_store import BrokenArtifact, Store
from resources.errors import conflict
from resources.jobs.sandbox import registered_name
from resources.metadata.artifacts.file_hashes import UNKNOWN_HASH, FileHashes
from resources.metadata.database import Database
from resources.metadata.jobs import TRAINING, JobRecord, Jobs
from resources.metadata.registry.model_names import ModelKey
from resources.metadata.registry.model_versions import LoggedFiles
from resources.metadata.registry.version_lifecycle import ModelVersion, Registration, Registry
from resources.metadata.tracking.run_search import RunSearch
from resources.metadata.tracking.runs import Runs
from resources.monitoring.usage_totals import sum_run_gpu_hours
from resources.registration.model_facts import (
    MAX_CONFIG_BYTES,
    WEIGHTS_FORMAT,
    WeightFiles,
    combined_checksum,
    find_weights,
    read_architecture,
    read_run_facts,
)

# Resolves the last checkpoint of a run whose script registers `checkpoint/step-final`.
#
# The specification's own script logs `checkpoint/step-1000`, `-2000` and so on, and then registers a name under which it
# logged nothing: it means the last of them.

FINAL_NAME = re.compile(r"(.+/)?(step|checkpoint)-final")
FINAL_FOLDER, STEP_KEY_PREFIX = "checkpoint-final", "checkpoint/step-"
"""The key `checkpoint/step-1000` is stored as `checkpoint-1000`, so `checkpoint-final` means either."""


def resolve_artifact_key(store: Store, records: FileHashes, run_id: str, artifact: str) -> str | None:
    """Return the key of a run's artifact.

    Its own, or that of the last checkpoint if it means that; None if there is none.
    """
    root = f"{uris.run_artifacts(run_id)}/"
    try:
        if store.exists(root + artifact):
            return artifact
    except BrokenArtifact:
        return None
    beginnings = final_checkpoint_prefixes(artifact)
    files = {uri for beginning in beginnings for uri in store.list((root + beginning).rpartition("/")[0])}
    uploads = {uri.removeprefix(root): number for uri, number in records.last_upload_ids(sorted(files)).items()}
    return newest_upload(beginnings, uploads)


def final_checkpoint_prefixes(artifact: str) -> list[str]:
    """Return the key prefixes of the checkpoints that a name for the last one covers.

    Empty for other names.
    """
    if not FINAL_NAME.fullmatch(artifact):
        return []
    return [artifact.removesuffix("final"), *([STEP_KEY_PREFIX] if artifact == FINAL_FOLDER else [])]


def newest_upload(beginnings: Sequence[str], uploads: Mapping[str, int]) -> str | None:
    """Return the newest file or folder with one of the prefixes.

    Args:
        uploads: a number for each file of the run that increases with time; steps do not if a script starts over.
    """
    last: dict[str, int] = {}
    for file, number in uploads.items():
        for beginning in beginnings:
            if file.startswith(beginning) and (name := file.removeprefix(beginning).partition("/")[0]):
                last[beginning + name] = max(number, last.get(beginning + name, 0))
    return max(last, key=lambda key: (last[key], key), default=None)


# Registers a run as a model version, whose description is read from the run's own record.
#
# The version asset, the API and the client all use this module, so that the gate's verdict applies to each.

"""The definition for jobs with a configuration of their own: their models have the jobs' names."""
ARTIFACT_TAG = "hanzo.artifact"
"""The tag with the resolved artifact of a version that was registered by a name for the last checkpoint."""
CHECKPOINTS_ARTIFACT = "checkpoints"
"""The artifact of a command that contains its final checkpoint if it logged none. Only for a completed job: another may
resume, and its snapshots are deleted one after the other.
"""


def register_job(
    database: Database, store: Store, name: str, job: JobRecord, tags: Mapping[str, str] | None = None
) -> ModelVersion:
    """Register a trained and evaluated job: in staging, or quarantined with the gate's reasons.

    Raises:
        HanzoError: the job is not trained or not evaluated yet.
    """
    if job.status != "completed" or job.evaluation is None:
        state = job.status if job.status != "completed" else "completed, but not evaluated yet"
        raise conflict(f"run '{job.id}' is {state}: it can be registered after its evaluation")
    accepted = bool(job.evaluation["verdict"]["accepted"])
    scores = job.evaluation["report"]["scores"]["tuned"]
    base = job.artifact("base")
    registration = describe_run(
        database,
        job.id,
        architecture=json.loads(store.get_bytes(f"{base.uri}/config.json"))["architectures"][0],
        metrics={metric: value for metric, value in scores.items() if value is not None},
        source=job.trained.uri,
        user=job.user_id,
        tags=tags or {},
    )
    model, registry = ModelKey(job.organization, name), Registry(database)
    with database.write() as connection:
        if (known := registry.find_by_training(model, job.id, connection)) is not None:  # its model may have been renamed
            return known
        return registry.register(
            connection,
            model,
            registration,
            {find_trained_role(job.artifacts): job.trained},
            quarantine=None if accepted else "; ".join(job.evaluation["verdict"]["reasons"]),
        )


def register_run(
    database: Database, store: Store, name: str, run_id: str, artifact: str, user: str, tags: Mapping[str, str]
) -> ModelVersion:
    """Register any run.

    A training job's like `register_job`, another's with one of its artifacts as the source.

    Raises:
        HanzoError: the run has no such artifact, or is a training job's that is of another model or not evaluated yet.
    """
    with database.read() as connection:
        jobs = Jobs(database)
        job = jobs.find(run_id, connection)
    # A command's run is treated like any script's: what it logged can be registered while it runs, and is not evaluated.
    if job is not None and job.type == TRAINING:
        if (own := registered_model_name(job)) != name:
            raise conflict(f"run '{run_id}' trained the model '{own}': register it as '{own}'")
        return register_job(database, store, name, job, tags)
    run = Runs(database).get(run_id)
    records = FileHashes(database)
    key, listed = resolve_artifact_key(store, records, run_id, artifact), {}
    if key is not None:
        source = uris.run_artifacts(run_id, key)
    elif (
        job is not None
        and job.status == "completed"
        and CHECKPOINTS_ARTIFACT in job.artifacts
        and final_checkpoint_prefixes(artifact)
    ):
        checkpoints = job.artifact(CHECKPOINTS_ARTIFACT)
        key, source = CHECKPOINTS_ARTIFACT, checkpoints.uri
        listed = {f"{source}/{file.object_path}": file.sha256 for file in store.manifest(checkpoints).files}
    else:
        raise conflict(f"run '{run_id}' has no artifact '{artifact}': log it before you register it")
    if key != artifact:
        tags = {**tags, ARTIFACT_TAG: key}
    weights = find_weights(source, store.list(source) or [source])
    try:
        architecture = stored_architecture(store, weights)
        files = {WEIGHTS_FORMAT: hash_logged_files(store, records, weights, listed)} if weights.files else {}
    except FileNotFoundError:
        raise conflict(f"artifact '{key}' of run '{run_id}' is being replaced: register it after the upload") from None
    registration = describe_run(
        database, run_id, architecture=architecture, metrics=None, source=source, user=user, tags=tags
    )
    with database.write() as connection:
        model = ModelKey(run.organization, name)
        return Registry(database).register(connection, model, registration, files, stage="none")


def stored_architecture(store: Store, weights: WeightFiles) -> str:
    if weights.config is None or store.size(weights.config) > MAX_CONFIG_BYTES:
        return ""
    return read_architecture(store.get_bytes(weights.config))


def hash_logged_files(store: Store, records: FileHashes, weights: WeightFiles, listed: Mapping[str, str]) -> LoggedFiles:
    """Return the logged files with their hashes.

    A file's hash is the recorded one or the one in the manifest (`listed`). A file with no hash, or several, is read.
    """
    hashes = {}
    for location in weights.files:
        known = {row.sha256 for row in records.at(location)} - {UNKNOWN_HASH}
        if location in listed:
            known.add(listed[location])
        hashes[location.rpartition("/")[2]] = known.pop() if len(known) == 1 else store.sha256(location)
    return LoggedFiles(weights.location, sum(store.size(location) for location in weights.files), combined_checksum(hashes))


def registered_model_name(job: JobRecord) -> str:
    """Return the name under which a training job's model is registered, exported and deployed."""
    model = str(job.config["model"])
    return registered_name(model, job.name)


def describe_run(
    database: Database,
    run_id: str,
    *,
    architecture: str,
    metrics: dict[str, float] | None,
    source: str,
    user: str,
    tags: Mapping[str, str],
) -> Registration:
    """Describe a run by its params and metrics.

    What it did not log is left out.

    Args:
        metrics: the results of its evaluation; None if it was not evaluated, and the run's own are used.
    """
    with database.read() as connection:
        gpu_hours = sum_run_gpu_hours(connection, run_id)
    facts = read_run_facts(RunSearch(database).get(Runs(database).get(run_id)), gpu_hours)
    return Registration(
        run_id=run_id,
        architecture=architecture,
        base_model=facts.base_model,
        method=facts.method,
        metrics=facts.metrics if metrics is None else metrics,
        training_config=facts.training_config,
        source=source,
        created_by=user,
        tags=dict(tags),
    )
