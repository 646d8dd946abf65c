"""Records of training and command runs: everything needed to run them again."""

import hashlib
import json
import platform
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, JsonValue, ValidationError, model_validator
from sqlalchemy import Connection, select

from recipes.contracts.job import Hardware
from recipes.contracts.recipe import Recipe
from recipes.contracts.recovery_log import RecoveryEvent
from recipes.contracts.rendering import CURRENT_RENDERING, KeptRendering, restore_rendering
from recipes.contracts.validation_errors import explain_first_error
from recipes.storage import uris
from recipes.storage.artifact_store import BrokenArtifact, Store
from recipes.storage.manifest import Artifact
from resources.installation import LOCK_FILE, git_commit, git_diff
from resources.metadata.database import Database
from resources.metadata.datasets import DatasetVersion
from resources.metadata.field_rules import MAX_DATASET_DIGEST
from resources.metadata.job_record import RESUMED_KEY, mask_config
from resources.metadata.jobs import DATASET_KEY, JobRecord
from resources.metadata.tables import runs
from resources.metadata.tracking.run_data import RunData
from resources.metadata.tracking.run_inputs import CONTEXT_TAG, Dataset, DatasetInput, Inputs

# The record of a training run: everything needed to run it again, written once before it starts.
#
# It is an artifact of its own, so that a model's chain includes it: recipe, seeds, data, lock file, git commit.

RECORD_FILE = "run.json"


class Environment(BaseModel, frozen=True):
    """The code that ran.

    `git_dirty` says whether tracked files differed from the commit;

    `git_diff_sha256` hashes the diff. The machine and the packages are recorded by the program itself, in `Result.machine`.
    """

    git_commit: str
    git_dirty: bool
    git_diff_sha256: str = ""
    lock_sha256: str
    python: str


class RunRecord(BaseModel, frozen=True):
    """Everything that determines a run.

    For a replay: `replay_of` is the run that it repeats. `threads` is that run's number of CPU threads, because another
    order of summation changes the sums. `repeats` are the incidents from which that run recovered: the replay uses the same
    smaller micro-batches, which also change the sums, and skips the same samples.
    """

    run_id: str
    model: str
    dataset: str
    recipe: Recipe
    seed: int
    environment: Environment
    replay_of: str | None = None
    repeats: tuple[RecoveryEvent, ...] = ()
    threads: int | None = None
    rendering: KeptRendering = CURRENT_RENDERING

    _restore_rendering = model_validator(mode="before")(restore_rendering)

    @property
    def hardware(self) -> Hardware:
        """The hardware that the run requests."""
        hardware = self.recipe.hardware
        return hardware if self.threads is None else hardware.model_copy(update={"cpu": self.threads})


def read_environment(source: Path) -> Environment:
    """Read the environment of an installation (see `resources.installation`)."""
    changes = git_diff(source)
    lock = source / LOCK_FILE
    return Environment(
        git_commit=git_commit(source),
        git_dirty=bool(changes),
        git_diff_sha256=hashlib.sha256(changes.encode()).hexdigest() if changes else "",
        lock_sha256=hashlib.sha256(lock.read_bytes()).hexdigest() if lock.is_file() else "none",
        python=platform.python_version(),
    )


def write_record(store: Store, record: RunRecord, inputs: dict[str, str]) -> Artifact:
    """Store the record as an artifact.

    An existing record is kept: a resumed run keeps the record of its first start.
    """
    uri = uris.run_record(record.run_id)
    if found := store.find(uri):
        return found
    with tempfile.TemporaryDirectory() as scratch:
        text = json.dumps(record.model_dump(mode="json"), indent=1, sort_keys=True)
        (Path(scratch) / RECORD_FILE).write_text(text, encoding="utf-8")
        facts: dict[str, JsonValue] = {
            "run_id": record.run_id,
            "recipe": record.recipe.name,
            "seed": record.seed,
            "git_commit": record.environment.git_commit,
            "lock_sha256": record.environment.lock_sha256,
            **({"replay_of": record.replay_of} if record.replay_of else {}),
        }
        return store.publish(Path(scratch), uri, "run", inputs=inputs, facts=facts)


def read_record(store: Store, artifact: Artifact) -> RunRecord:
    """Read the record, and check that it is unchanged.

    Otherwise a replay would run, and prove, something else.

    Raises:
        BrokenArtifact: the manifest differs from the artifact's digest, the record from its hash in the manifest, or this
            release cannot read it.
    """
    where = f"{artifact.uri}/{RECORD_FILE}"
    recorded = next((file.sha256 for file in store.manifest(artifact).files if file.path == RECORD_FILE), None)
    try:
        raw = store.get_bytes(where)
    except FileNotFoundError:
        raise BrokenArtifact(f"{where} is missing") from None
    if (found := hashlib.sha256(raw).hexdigest()) != recorded:
        raise BrokenArtifact(f"{where} was changed since the run: it has SHA-256 {found}, recorded is {recorded}")
    try:
        return RunRecord.model_validate_json(raw)
    except ValidationError as error:
        raise BrokenArtifact(
            f"{where} is no record that this release can read: {explain_first_error(error, RunRecord)}"
        ) from None


def changed_values(store: Store, artifact: Artifact, logged: Mapping[str, str]) -> tuple[str, ...]:
    """Return how a changed record differs from the params that the run `logged`."""
    try:
        recipe = RunRecord.model_validate_json(store.get_bytes(f"{artifact.uri}/{RECORD_FILE}")).recipe
    except (FileNotFoundError, ValidationError):
        return ()
    pairs = (
        (key, then, format_param(getattr(recipe, key))) for key, then in sorted(logged.items()) if key in Recipe.model_fields
    )
    return tuple(f"{key} was {then}, and is {now}" for key, then, now in pairs if now != then)


def format_param(value: object) -> str:
    """Format a value of a recipe as a param.

    MLflow's clients do so, and YAML has lists instead of tuples.
    """
    return str(list(value) if isinstance(value, tuple) else value)


# The record of a command's run: its command, its code and its data.
#
# A script may log these or not. What the job file names is known, and is logged on its behalf.

LINEAGE_ROLES = {"training": "train", "eval": "test"}
"""The role of a job's dataset in the lineage of its run, by submitted job type: only `training` counts as trained on."""
MLFLOW_CONTEXTS = {"training": "training", "eval": "evaluation"}
"""The same in MLflow's terms."""


def write_command_record(store: Store, job: JobRecord, inputs: Mapping[str, Artifact]) -> Artifact:
    """Store the record as an artifact, so that the run has lineage.

    An existing record is kept.

    Args:
        inputs: the job's input artifacts, by role.
    """
    uri = uris.run_record(job.id)
    if found := store.find(uri):
        return found
    masked = {key: value for key, value in mask_config(job.config).items() if key != RESUMED_KEY}
    facts: dict[str, JsonValue] = {"run_id": job.id, "command": list(job.config["command"])}
    if commit := job.config.get("git_commit"):
        facts["git_commit"] = commit
    used = {
        LINEAGE_ROLES.get(masked["type"], role) if role == DATASET_KEY else role: each.digest
        for role, each in inputs.items()
    }
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "command.json").write_text(json.dumps(masked, indent=1, sort_keys=True), encoding="utf-8")
        return store.publish(Path(scratch), uri, "run", inputs=used, facts=facts)


def mlflow_digest(version: DatasetVersion) -> str:
    """Return the digest of a version's records, cut to MLflow's maximum length."""
    return version.artifact.digest[:MAX_DATASET_DIGEST]


def log_dataset_input(database: Database, job: JobRecord, version: DatasetVersion) -> None:
    """Log the dataset as an input of the run, once.

    A deleted run is left unchanged.
    """
    context = MLFLOW_CONTEXTS.get(job.config["type"])
    tags = {"version": str(version.version), **({CONTEXT_TAG: context} if context else {})}
    source = json.dumps({"uri": version.storage_path})
    found = Dataset(
        version.name, mlflow_digest(version), "s3", source, profile=json.dumps({"num_records": version.num_records})
    )
    with database.write() as connection:
        if is_run_active(connection, job.id):
            Inputs(database).log(job.id, [DatasetInput(found, tags)], connection=connection)


def log_command_end(
    connection: Connection,
    database: Database,
    job: JobRecord,
    version: DatasetVersion | None,
    tags: Sequence[tuple[str, str]],
) -> None:
    """Log tags, and the params that a recipe's run would have.

    Called within the transaction that completes the job.

    Not earlier: a param never changes, and a script that logs one called `dataset` itself would get an error. Params that
    the script has logged are kept.
    """
    data = {"dataset": version.name, "dataset_version": str(version.version)} if version else {}
    commit = job.config.get("git_commit")
    values = {**data, **({"git_commit": commit} if commit else {})}
    if is_run_active(connection, job.id):
        run_data = RunData(database)
        logged = run_data.params(job.id, connection=connection)
        missing = [(key, value) for key, value in values.items() if key not in logged]
        run_data.log_batch(job.id, params=missing, tags=tags, connection=connection)


def is_run_active(connection: Connection, run_id: str) -> bool:
    return connection.execute(select(runs.c.lifecycle_stage).where(runs.c.id == run_id)).scalar() == "active"
