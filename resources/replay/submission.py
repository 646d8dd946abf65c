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

# What is left of a run that ended well: its record, its result, its weights. All that a replay has to go by.

INPUT_ROLES = ("train", "validation", "base")
WEIGHTS_SUFFIX = ".safetensors"


@dataclass(frozen=True)
class FinishedRun:
    """A run that is completed, and what it left."""

    job: JobRecord
    record: RunRecord
    losses: dict[int, float | None]
    incidents: tuple[RecoveryEvent, ...]
    machine: Machine | None

    @property
    def processes(self) -> str:
        """How many trained it, one number after the other: on another one its sums are others."""
        resumed = self.job.resumed
        counts = (self.record.recipe.processes, *resumed.gpus_before, *([resumed.gpus] if resumed.gpus else []))
        return ", ".join(str(count) for count, _ in groupby(counts))

    @property
    def repeated_steps(self) -> tuple[range, ...]:
        """Steps that it did once more: after a divergence, or sent back."""
        diverged = (steps for steps, _ in RecoveryLog(entries=self.incidents).repeated_steps)
        return (*diverged, *(back.repeated_steps for back in self.job.resumed.sent_back))


def read_finished_run(database: Database, store: Store, run_id: str) -> FinishedRun:
    """The run of a training job, once it is completed.

    Raises:
        HanzoError: there is no such run, no job of this server trained it, it is not completed, or what it left is gone or
            was changed since.
    """
    with database.read() as connection:
        job = Jobs(database).find(run_id, connection)
    if job is None or job.type != TRAINING:
        raise not_found(f"no job trained a run '{run_id}': a replay needs one that did, see `hanzo-ml job list`")
    if job.status != "completed":
        raise conflict(f"run '{run_id}' is {job.status}, and there is nothing to compare before it is completed")
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
    """That what the run was made of is still in the store: each manifest as it was, and each file there.

    The bytes are verified by the program that reads them.

    Raises:
        HanzoError: naming what is missing.
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
    """Role and path -> SHA-256 of each file of weights that the run made, as its manifests have it.

    Raises:
        HanzoError: a manifest is gone.
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


# A finished run as a new job: the record of the new run is that of the first, and says so.

REPLAY_TAG = "hanzo_ml.replay_of"


@dataclass(frozen=True)
class Replay:
    """A replay that waits for its start, and in what its environment differs from the first run's."""

    job: JobRecord
    environment: tuple[Difference, ...]


def submit_replay(
    database: Database, store: Store, first: FinishedRun, source: Path, user: str, id: str | None = None
) -> Replay:
    """Queue the run once more. Its record is written now, so that nothing decides it but the first run's.

    Args:
        source: the checkout whose programs will run.
        id: of the replay; one that is there already stays as it is.

    Raises:
        HanzoError: what the run was made of is no longer there.
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
    """What a node's processes share, as in the first run, on a processor. On a GPU they decide no number.

    A machine says it of one process.
    """
    machine, shape = first.machine, first.record.recipe.distributed
    return None if machine is None or machine.gpus else machine.threads * (shape.gpus_per_node if shape else 1)
