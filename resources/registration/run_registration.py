"""A run becomes a version of the registry: what the version says of itself is taken from the run's own record.

Version asset, API and client all end here, so that the gate's verdict holds whichever way a run is registered.
"""

import json
from collections.abc import Mapping

from recipes.contracts.results import trained_role
from recipes.storage import uris
from recipes.storage.artifact_store import Store
from resources.errors import conflict
from resources.final_checkpoint import logged_as, meant_by
from resources.jobs.sandbox import registered_name
from resources.metadata.artifacts.file_hashes import UNSEEN, ArtifactFiles
from resources.metadata.database import Database
from resources.metadata.jobs import TRAINING, JobRecord, Jobs
from resources.metadata.registry.model_key import ModelKey
from resources.metadata.registry.model_versions import LoggedFiles
from resources.metadata.registry.registry import ModelVersion, Registration, Registry
from resources.metadata.tracking.run_search import RunSearch
from resources.metadata.tracking.runs import Runs
from resources.registration.model_facts import FORMAT, MAX_CONFIG_BYTES, Weights, architecture_in, checksum_of, weights_in
from resources.run_facts import facts_of

"""The definition of jobs that bring their own configuration: their models have the jobs' names."""
ARTIFACT_TAG = "hanzo.artifact"
"""Which artifact a version is of, where the one that was asked for is a word for the last checkpoint."""
LEFT = "checkpoints"
"""The artifact of a command, which its final checkpoint is in where it logged none. One that did not end well may be gone on
with, and its states go one after the other.
"""


def register_job(
    database: Database, store: Store, name: str, job: JobRecord, tags: Mapping[str, str] | None = None
) -> ModelVersion:
    """The version of a trained and evaluated job: in staging, or quarantined with the gate's reasons.

    Raises:
        HanzoError: the job is not trained or not evaluated yet.
    """
    if job.status != "completed" or job.evaluation is None:
        state = job.status if job.status != "completed" else "completed, but not evaluated yet"
        raise conflict(f"run '{job.id}' is {state}: a version is registered once it was evaluated")
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
        if (known := registry.of_training(model, job.id, connection)) is not None:  # its model may be renamed
            return known
        return registry.register(
            connection,
            model,
            registration,
            {trained_role(job.artifacts): job.trained},
            quarantine=None if accepted else "; ".join(job.evaluation["verdict"]["reasons"]),
        )


def register_run(
    database: Database, store: Store, name: str, run_id: str, artifact: str, user: str, tags: Mapping[str, str]
) -> ModelVersion:
    """The version of any run: of a training job's as `register_job`, of another's a pointer to one of its artifacts.

    Raises:
        HanzoError: the run has no such artifact; that of a training job is of another model, or not evaluated yet.
    """
    with database.read() as connection:
        jobs = Jobs(database)
        job = jobs.find(run_id, connection)
    # A command's run is as any script's: what it logged is registered while it runs, and nothing evaluates it.
    if job is not None and job.type == TRAINING:
        if (own := model_of(job)) != name:
            raise conflict(f"run '{run_id}' trained the model '{own}', as which it is exported: register it as '{own}'")
        return register_job(database, store, name, job, tags)
    run = Runs(database).get(run_id)
    records = ArtifactFiles(database)
    key, listed = logged_as(store, records, run_id, artifact), {}
    if key is not None:
        source = uris.run_artifacts(run_id, key)
    elif job is not None and job.status == "completed" and LEFT in job.artifacts and meant_by(artifact):
        left = job.artifact(LEFT)
        key, source = LEFT, left.uri
        listed = {f"{source}/{file.path}": file.sha256 for file in store.manifest(left).files}
    else:
        raise conflict(f"run '{run_id}' has no artifact '{artifact}': log it before it is registered")
    if key != artifact:
        tags = {**tags, ARTIFACT_TAG: key}
    weights = weights_in(source, store.list(source) or [source])
    try:
        architecture = architecture_of(store, weights)
        files = {FORMAT: logged_files(store, records, weights, listed)} if weights.files else {}
    except FileNotFoundError:
        raise conflict(f"artifact '{key}' of run '{run_id}' is being replaced: register it when it is there") from None
    registration = describe_run(
        database, run_id, architecture=architecture, metrics=None, source=source, user=user, tags=tags
    )
    with database.write() as connection:
        model = ModelKey(run.organization, name)
        return Registry(database).register(connection, model, registration, files, stage="none")


def architecture_of(store: Store, weights: Weights) -> str:
    if weights.config is None or store.size(weights.config) > MAX_CONFIG_BYTES:
        return ""
    return architecture_in(store.get_bytes(weights.config))


def logged_files(store: Store, records: ArtifactFiles, weights: Weights, listed: Mapping[str, str]) -> LoggedFiles:
    """Each file's hash is the recorded one, or that of a manifest, which has it `listed`; what has none, or one of several,
    is read.
    """
    hashes = {}
    for place in weights.files:
        known = {row.sha256 for row in records.at(place)} - {UNSEEN}
        if place in listed:
            known.add(listed[place])
        hashes[place.rpartition("/")[2]] = known.pop() if len(known) == 1 else store.sha256(place)
    return LoggedFiles(weights.place, sum(store.size(place) for place in weights.files), checksum_of(hashes))


def model_of(job: JobRecord) -> str:
    """The name under which what a training job trained is registered, exported and deployed."""
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
    """What the run's parameters say, and what it measured (specification row O1). What it does not say is left out.

    Args:
        metrics: what its evaluation measured; None where nothing here evaluates it, and the run's own are all there is.
    """
    facts = facts_of(RunSearch(database).get(Runs(database).get(run_id)))
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
