"""What is left of a run that ended well: its record, its result, its weights. All that a replay has to go by."""

from dataclasses import dataclass
from itertools import groupby

from pydantic import ValidationError

from recipes.contracts.job import Machine, Result
from recipes.contracts.recovery_log import RecoveryEvent, RecoveryLog
from recipes.contracts.results import TRAINED_ROLES, TrainingFacts
from recipes.storage import uris
from recipes.storage.artifact_store import BrokenArtifact, Store
from resources.errors import HanzoError, conflict, not_found
from resources.lineage.run_record import RunRecord, changed_values, read_record
from resources.metadata.database import Database
from resources.metadata.jobs import TRAINING, JobRecord, Jobs
from resources.metadata.tracking.run_data import RunData

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
                elif not file.chunks and not store.exists(f"{artifact.uri}/{file.path}"):
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
