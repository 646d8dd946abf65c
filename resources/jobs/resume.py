"""A job that failed or was cancelled goes on (rows I1, I10): from its newest checkpoint, its best, or one of a step; also on
another number of GPUs.

Its run is the same one. What it did after the chosen checkpoint stays in the store, and is known as it was logged: those
steps are logged once more (`recipes.contracts.job`).
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
    """How a job is to go on; as it was where nothing is said."""

    resume_from: Literal["latest", "best"] | int = Field("latest", description="or the step of a checkpoint")
    gpus: int | None = Field(None, ge=1, description="of all nodes; without GPUs, processes")


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint in the store; `loss` is of the validation split, where it was evaluated."""

    step: int
    uri: str
    loss: float | None


def resume_job(
    database: Database, store: Store, identifier: str, wish: Wish, user: str, quota: Quota | None = None
) -> JobRecord:
    """Queue an ended job once more, within the quota of its organization.

    Raises:
        HanzoError: it has not ended, or ended well; there is no such checkpoint; or it cannot be trained on so many GPUs.
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
    """Write down how far a run had come that was sent back, and when: its program went on to log while it was told to end.

    For whoever starts it anew, once that has ended and before its new program begins. Done once.
    """
    *before, last = job.resumed.sent_back or (None,)
    if last is None or last.done is not None:
        return
    known = {point.key: point.step for point in Metrics(database).latest(job.id)}
    settled = last.model_copy(update={"done": max(last.step, known.get(LOSS_METRIC, 0)), "at": now_ms()})
    resumed = job.resumed.model_copy(update={"sent_back": (*before, settled)})
    Jobs(database).set_config_value(job.id, RESUMED_KEY, resumed.model_dump(mode="json"))


def refuse_unresumable_job(job: JobRecord, wish: Wish, sweeping: Collection[str]) -> None:
    """`sweeping` are the sweeps that run: of one that has ended, a trial goes on as any job does."""
    if job.status == "completed":
        raise conflict(
            f"job '{job.id}' is completed, and what it trained is there: submit a new job to train otherwise, or see "
            f"`hanzo-ml run replay {job.id}` to train the same once more"
        )
    if job.status not in ("failed", "cancelled"):
        raise conflict(f"job '{job.id}' is {job.status}: cancel it first, if it is to go on otherwise")
    if job.type == PREPARATION:
        raise conflict(f"job '{job.id}' prepares a dataset: ask for it again, and it finds the parts that are done")
    if (sweep := job.config.get(SWEEP_KEY)) in sweeping:
        raise conflict(
            f"job '{job.id}' is a trial of sweep '{sweep}', which goes on without it: resume it when that has ended, or "
            f"after `hanzo-ml hpo cancel {sweep}`"
        )
    if job.type == COMMAND and (wish.gpus or wish.resume_from != "latest"):
        raise invalid(
            f"job '{job.id}' runs a command, which finds its checkpoints and starts its processes itself: it can be resumed "
            "as it is, without `resume_from` and `gpus`"
        )


def refuse_unfitting_gpus(recipe: Recipe, gpus: int, store: Store, quota: Quota | None) -> None:
    """What would fail when the job is started."""
    try:
        changed = recipe.for_processes(gpus)
    except BadConfiguration as problem:
        raise invalid(str(problem)) from None
    admit_recipe(changed, base_model_shape(changed, store))
    refuse_impossible_job(quota, count_gpus(changed.hardware, changed.distributed))


def list_checkpoints(job: JobRecord, record: RunRecord | None, store: Store) -> dict[int, FoundCheckpoint]:
    """Those that the run can go back to, by their steps; the last is the one that it would go on from by itself.

    Those of the way that it is on, and of the ways before it; of one step the later one counts, as in
    `recipes.training.checkpointing.resume_point`.
    """
    # A run whose recipe says `best` found none as it began.
    begins = (0,) if record and record.recipe.checkpoint.resume_from == "best" else ()
    folder = uris.run_checkpoints(job.id)
    found = list_folder_checkpoints(folder, store)
    for step in (*begins, *(back.step for back in job.resumed.sent_back)):
        folder = f"{folder}/{rewind_folder(step)}"
        if step in found:  # with it the way begins
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
        with suppress(FileNotFoundError):  # the program that was told to end keeps the last few, and saved one more
            loss = parse_quality(store.get_bytes(f"{folder}/{step}/{MANIFEST_FILE}")).loss
            found[step] = FoundCheckpoint(step, f"{folder}/{step}", loss)
    return found


def choose_checkpoint(checkpoints: Mapping[int, FoundCheckpoint], wish: Literal["best"] | int) -> FoundCheckpoint:
    """The checkpoint that is asked for. Raises HanzoError: there is none, naming those there are."""
    available = (
        f"there are checkpoints of steps {', '.join(map(str, sorted(checkpoints)))}"
        if checkpoints
        else "there is no checkpoint"
    )
    if wish == "best":
        best = rank_by_loss({step: found.loss for step, found in checkpoints.items()})
        if not best:
            raise invalid(f"no checkpoint was evaluated, so that none is the best: {available}")
        return checkpoints[best[0]]
    if wish not in checkpoints:
        raise invalid(f"there is no checkpoint of step {wish}: {available}")
    return checkpoints[wish]
