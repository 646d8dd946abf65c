"""Resume a failed or cancelled job from its newest, its best or a given checkpoint.

The number of GPUs may change. The run stays the same: what it did after the chosen checkpoint remains in the store, and its
steps are logged again (`recipes.contracts.job`).
"""

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from recipes.checkpoints.retention import parse_quality, rank_by_loss
from recipes.contracts.frozen_model import FrozenModel
from recipes.contracts.job import BadConfiguration
from recipes.contracts.recipe import Recipe
from recipes.contracts.rewind import Rewind, rewind_folder
from recipes.storage import uris
from recipes.storage.artifact_store import MANIFEST_FILE, Store
from resources.errors import conflict, invalid
from resources.estimate.admission import admit_recipe, base_model_shape
from resources.hpo.sweeps import SWEEP_KEY, Sweeps
from resources.lineage.run_record import RunRecord, read_record
from resources.metadata.database import Database
from resources.metadata.job_record import RESUMED_KEY, ResumeHistory
from resources.metadata.jobs import COMMAND, PREPARATION, JobRecord, Jobs
from resources.metadata.outbox import now_ms
from resources.metadata.tracking.metrics import Metrics
from resources.scheduling.quotas import count_gpus, refuse_impossible_job
from resources.settings.scheduler import Quota

LOSS_METRIC = "train/loss"


class Wish(FrozenModel, extra="forbid"):
    """How to resume a job; unset values stay as they were."""

    resume_from: Literal["latest", "best"] | int = Field("latest", description="or the step of a checkpoint")
    gpus: int | None = Field(None, ge=1, description="of all nodes; without GPUs, processes")


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint in the store; `loss` is its validation loss, if evaluated."""

    step: int
    uri: str
    loss: float | None


def resume_job(
    database: Database, store: Store, identifier: str, wish: Wish, user: str, quota: Quota | None = None
) -> JobRecord:
    """Queue an ended job again, within its organization's quota.

    Raises:
        HanzoError: the job has not ended or has completed, the checkpoint does not exist, or the number of GPUs is invalid.
    """
    jobs = Jobs(database)
    job = jobs.read(identifier)
    refuse_unresumable_job(job, wish, Sweeps(database).running())
    place = store.find(uris.run_record(job.id)) if job.type != COMMAND else None
    record = read_record(store, place) if place else None
    if wish.gpus and record:
        refuse_unfitting_gpus(record.recipe, wish.gpus, store, quota)
    back = job.resumed.sent_back
    if wish.resume_from != "latest":
        checkpoints = list_checkpoints(job, record, store)
        start = choose_checkpoint(checkpoints, wish.resume_from)
        back = (*back, Rewind(step=start.step))
    known, before = job.resumed.gpus, job.resumed.gpus_before
    resumed = ResumeHistory(
        times=job.resumed.times + 1,
        sent_back=back,
        gpus=wish.gpus or known,
        gpus_before=(*before, known) if wish.gpus and known else before,
    )
    return jobs.resume(job.id, resumed, {"user_id": user, "resume_from": wish.resume_from, "gpus": wish.gpus})


def settle_rewind(database: Database, job: JobRecord) -> None:
    """Record the last logged step and the time of a rewound run.

    Its program kept logging while it stopped. Done once, after that program has ended and before the new one starts.
    """
    *before, last = job.resumed.sent_back or (None,)
    if last is None or last.done is not None:
        return
    known = {point.key: point.step for point in Metrics(database).latest(job.id)}
    settled = last.model_copy(update={"done": max(last.step, known.get(LOSS_METRIC, 0)), "at": now_ms()})
    resumed = job.resumed.model_copy(update={"sent_back": (*before, settled)})
    Jobs(database).set_config_value(job.id, RESUMED_KEY, resumed.model_dump(mode="json"))


def refuse_unresumable_job(job: JobRecord, wish: Wish, sweeping: Collection[str]) -> None:
    """Raise HanzoError if a job cannot resume; trials of `sweeping` sweeps cannot."""
    if job.status == "completed":
        raise conflict(
            f"job '{job.id}' is completed, and its model exists: submit a new job to train with other settings, or see "
            f"`hanzo-ml run replay {job.id}` to repeat the same training"
        )
    if job.status not in ("failed", "cancelled"):
        raise conflict(f"job '{job.id}' is {job.status}: cancel it first, to resume it with other settings")
    if job.type == PREPARATION:
        raise conflict(f"job '{job.id}' prepares a dataset: submit it again, and it reuses the finished parts")
    if (sweep := job.config.get(SWEEP_KEY)) in sweeping:
        raise conflict(
            f"job '{job.id}' is a trial of sweep '{sweep}', which continues without it: resume it when that has ended, or "
            f"after `hanzo-ml hpo cancel {sweep}`"
        )
    if job.type == COMMAND and (wish.gpus or wish.resume_from != "latest"):
        raise invalid(
            f"job '{job.id}' runs a command, which finds its checkpoints and starts its processes itself: resume it without "
            "`resume_from` and `gpus`"
        )


def refuse_unfitting_gpus(recipe: Recipe, gpus: int, store: Store, quota: Quota | None) -> None:
    """Raise HanzoError for what would fail when the job starts."""
    try:
        changed = recipe.for_processes(gpus)
    except BadConfiguration as problem:
        raise invalid(str(problem)) from None
    admit_recipe(changed, base_model_shape(changed, store))
    refuse_impossible_job(quota, count_gpus(changed.hardware, changed.distributed))


def list_checkpoints(job: JobRecord, record: RunRecord | None, store: Store) -> dict[int, FoundCheckpoint]:
    """Return the checkpoints that a run can resume from, by step; its default is last.

    These are the checkpoints of the current branch and of those before its rewinds; for equal steps the later branch counts,
    as in `recipes.training.checkpointing.resume_point`.
    """
    # A recipe that says `best` starts on a branch of its own, at step 0.
    begins = (0,) if record and record.recipe.checkpoint.resume_from == "best" else ()
    folder = uris.run_checkpoints(job.id)
    found = list_folder_checkpoints(folder, store)
    for step in (*begins, *(back.step for back in job.resumed.sent_back)):
        folder = f"{folder}/{rewind_folder(step)}"
        if step in found:  # the branch starts with it
            found[step] = found.pop(step)
        later = list_folder_checkpoints(folder, store)
        found = {known: one for known, one in found.items() if known not in later} | later
    return found


def list_folder_checkpoints(folder: str, store: Store) -> dict[int, FoundCheckpoint]:
    paths = (uri.removeprefix(f"{folder}/") for uri in store.list(folder))
    names = (path.removesuffix(f"/{MANIFEST_FILE}") for path in paths if path.endswith(f"/{MANIFEST_FILE}"))
    steps = sorted(int(name) for name in names if name.isdigit())
    found = {}
    for step in steps:
        with suppress(FileNotFoundError):  # deleted by the stopping program, which keeps the last few and saved another
            loss = parse_quality(store.get_bytes(f"{folder}/{step}/{MANIFEST_FILE}")).loss
            found[step] = FoundCheckpoint(step, f"{folder}/{step}", loss)
    return found


def choose_checkpoint(checkpoints: Mapping[int, FoundCheckpoint], wish: Literal["best"] | int) -> FoundCheckpoint:
    """Return the wanted checkpoint. Raises HanzoError naming those available."""
    available = (
        f"there are checkpoints of steps {', '.join(map(str, sorted(checkpoints)))}"
        if checkpoints
        else "there is no checkpoint"
    )
    if wish == "best":
        best = rank_by_loss({step: found.loss for step, found in checkpoints.items()})
        if not best:
            raise invalid(f"no checkpoint was evaluated, so there is no best one: {available}")
        return checkpoints[best[0]]
    if wish not in checkpoints:
        raise invalid(f"there is no checkpoint of step {wish}: {available}")
    return checkpoints[wish]
