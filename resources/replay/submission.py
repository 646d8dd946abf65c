"""A finished run as a new job: the record of the new run is that of the first, and says so."""

import uuid
from dataclasses import dataclass
from pathlib import Path

from recipes.contracts.recovery_log import OutOfMemory
from recipes.machine import read_machine
from recipes.storage.artifact_store import Store
from resources.lineage.run_record import RunRecord, read_environment, write_record
from resources.metadata.database import Database
from resources.metadata.datasets import Datasets
from resources.metadata.job_record import RESUMED_KEY
from resources.metadata.jobs import REPLAY_OF, JobRecord, Jobs
from resources.replay.comparison import Difference, environment_differences, process_differences
from resources.replay.finished_run import FinishedRun, check_inputs, missing_input_error

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
