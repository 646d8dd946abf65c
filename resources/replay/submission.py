"""Replay a finished run: read its record and submit it as a new job."""

import uuid
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from pydantic import ValidationError

from recipes.contracts.job import Machine, Result
from recipes.contracts.recovery_log import OutOfMemory, RecoveryEvent, RecoveryLog
from recipes.contracts.results import TRAINED_ROLES, TrainingFacts
from recipes.machine import read_machine
from recipes.storage import uris
from recipes.storage.artifact_store import BrokenArtifact, Store
from resources.errors import HanzoError, conflict, not_found
from resources.lineage.run_record import RunRecord, changed_values, read_environment, read_record, write_record
from resources.metadata.database import Database
from resources.metadata.datasets import Datasets
from resources.metadata.job_record import RESUMED_KEY
from resources.metadata.jobs import REPLAY_OF, TRAINING, JobRecord, Jobs
from resources.metadata.tracking.run_data import RunData
from resources.replay.comparison import Difference, environment_differences, process_differences

# Reads a completed run: its record, its result and its weights. A replay uses nothing else.

INPUT_ROLES = ("train", "validation", "base")
WEIGHTS_SUFFIX = ".safetensors"


@dataclass(frozen=True)
class FinishedRun:
    """A completed run and its results."""

    job: JobRecord
    record: RunRecord
    losses: dict[int, float | None]
    incidents: tuple[RecoveryEvent, ...]
    machine: Machine | None

    @property
    def processes(self) -> str:
        """The numbers of processes that trained it, in order: another number changes the sums."""
        resumed = self.job.resumed
        counts = (self.record.recipe.processes, *resumed.gpus_before, *([resumed.gpus] if resumed.gpus else []))
        return ", ".join(str(count) for count, _ in groupby(counts))

    @property
    def repeated_steps(self) -> tuple[range, ...]:
        """Steps that were trained again, after a divergence or because the run was sent back."""
        diverged = (steps for steps, _ in RecoveryLog(entries=self.incidents).repeated_steps)
        return (*diverged, *(back.repeated_steps for back in self.job.resumed.sent_back))


def read_finished_run(database: Database, store: Store, run_id: str) -> FinishedRun:
    """Read the completed run of a training job.

    Raises:
        HanzoError: there is no such run, no job of this server trained it, it is not completed, or its record or result is
            missing or was changed.
    """
    with database.read() as connection:
        job = Jobs(database).find(run_id, connection)
    if job is None or job.type != TRAINING:
        raise not_found(f"run '{run_id}' was not trained by a job: only such runs can be replayed, see `hanzo-ml job list`")
    if job.status != "completed":
        raise conflict(f"run '{run_id}' is {job.status}: only completed runs can be replayed or compared")
    place = uris.run_result(run_id, "train")
    described = job.artifact("run")
    try:
        record = read_record(store, described)
    except BrokenArtifact as error:
        changed = changed_values(store, described, RunData(database).params(run_id))
        raise missing_input_error(run_id, "; ".join((f"its record ({one_line(error)})", *changed))) from None
    try:
        result = Result.model_validate_json(store.get_bytes(place))
    except (FileNotFoundError, ValidationError) as error:
        raise missing_input_error(run_id, f"its result ({one_line(error)})") from None
    facts = TrainingFacts.model_validate(result.facts)
    return FinishedRun(job, record, facts.losses, facts.incidents, result.machine)


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def check_inputs(run: FinishedRun, store: Store) -> None:
    """Check that the run's inputs are still in the store.

    Each manifest unchanged, and each file present. The bytes are verified by the program that reads them.

    Raises:
        HanzoError: an input is missing, which the message names.
    """
    for role in INPUT_ROLES:
        artifact = run.job.artifact(role)
        name = f"its base model {run.record.recipe.base_model.uri}" if role == "base" else f"its {role} split"
        try:
            for file in store.manifest(artifact).files:
                if file.selection is not None:
                    store.origin(artifact.uri, file.selection)
                    store.read_line_mask(artifact.uri, file, file.selection)
                elif not file.chunks and not store.exists(f"{artifact.uri}/{file.object_path}"):
                    raise BrokenArtifact(f"{artifact.uri}/{file.path} is missing")
        except (BrokenArtifact, FileNotFoundError) as error:
            raise missing_input_error(run.job.id, f"{name} ({error})") from None


def missing_input_error(run_id: str, missing_input: str) -> HanzoError:
    return conflict(f"run '{run_id}' cannot be replayed without {missing_input}: restore it in the object store")


def read_weight_hashes(run: FinishedRun, store: Store) -> dict[str, str]:
    """Return the SHA-256 of each file of weights that the run made.

    The keys are `ROLE/PATH`; the hashes are those in the manifests.

    Raises:
        HanzoError: a manifest is missing.
    """
    made = {role: run.job.artifact(role) for role in TRAINED_ROLES if role in run.job.artifacts}
    try:
        return {
            f"{role}/{file.path}": file.sha256
            for role, artifact in made.items()
            for file in store.manifest(artifact).files
            if file.path.endswith(WEIGHTS_SUFFIX)
        }
    except BrokenArtifact as error:
        raise missing_input_error(run.job.id, f"its weights ({error})") from None


# Submits a finished run as a new job. The record of the new run equals the first run's, and names it.

REPLAY_TAG = "hanzo_ml.replay_of"


@dataclass(frozen=True)
class Replay:
    """A queued replay, and how its environment differs from the first run's."""

    job: JobRecord
    environment: tuple[Difference, ...]


def submit_replay(
    database: Database, store: Store, first: FinishedRun, source: Path, user: str, id: str | None = None
) -> Replay:
    """Queue a run again.

    Its record is written now, so that only the first run's record determines it.

    Args:
        source: the checkout whose programs will run.
        id: the id of the replay; if a job with it exists, it is returned unchanged.

    Raises:
        HanzoError: an input of the run no longer exists.
    """
    environment, machine = read_environment(source), read_machine()
    found = (
        *environment_differences(first.record.environment, first.machine, environment, machine, threads=False),
        *process_differences(first.processes, str(first.record.recipe.processes)),
    )
    if known := Jobs(database).find_by_id(id):
        return Replay(known, found)
    check_inputs(first, store)
    version = Datasets(database).read(first.record.dataset, first.job.organization)
    splits = {name: first.job.artifact(name).digest for name in ("train", "validation")}
    if any(version.split(name).digest != digest for name, digest in splits.items()):
        raise missing_input_error(first.job.id, f"the records that {version.reference} had then")
    record = RunRecord(
        run_id=id or uuid.uuid4().hex,
        model=first.record.model,
        dataset=first.record.dataset,
        recipe=first.record.recipe,
        seed=first.record.seed,
        environment=environment,
        replay_of=first.job.id,
        threads=thread_count(first),
        rendering=first.record.rendering,
        repeats=tuple(each for each in first.incidents if not isinstance(each, OutOfMemory) or each.after is not None),
    )
    write_record(store, record, splits)
    submitted = {key: value for key, value in first.job.config.items() if key != RESUMED_KEY}
    job = Jobs(database).submit(
        id=record.run_id,
        name=first.job.name,
        config={**submitted, "dataset": record.dataset, REPLAY_OF: first.job.id},
        user=user,
        organization=first.job.organization,
        tags={REPLAY_TAG: first.job.id},
    )
    return Replay(job, found)


def thread_count(first: FinishedRun) -> int | None:
    """Return the number of threads of a node's processes in the first run.

    None on a GPU, where it changes no result. A machine states the number for one process.
    """
    machine, shape = first.machine, first.record.recipe.distributed
    return None if machine is None or machine.gpus else machine.threads * (shape.gpus_per_node if shape else 1)
