"""Resuming an ended job: available checkpoints, and refusals with their messages."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recipes.checkpoints.retention import VALIDATION_LOSS_KEY
from recipes.contracts.recipe import Recipe
from recipes.contracts.rewind import Rewind
from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Manifest
from resources.errors import ErrorCode, HanzoError
from resources.hpo.sweep_advance import cancel_sweep
from resources.hpo.sweeps import SWEEP_KEY, Sweeps
from resources.jobs.resume import Wish, resume_job, settle_rewind
from resources.lineage.run_record import Environment, RunRecord, write_record
from resources.metadata.database import Database
from resources.metadata.field_rules import metric_point
from resources.metadata.job_record import ResumeHistory
from resources.metadata.jobs import COMMAND, PREPARATION, TRAINING, JobRecord, Jobs
from resources.metadata.outbox import Event, read_after
from resources.metadata.tracking.run_data import RunData
from resources.metadata.tracking.runs import Runs
from resources.settings.scheduler import Quota
from resources.settings.settings import Settings
from tests.resources.hpo.sweep_files import sweep
from tests.support.migrated_database import migrate

RUN = "s3://hanzo-ml/checkpoints/j"
ENVIRONMENT = Environment(git_commit="c", git_dirty=False, lock_sha256="l", python="3.11")


class House:
    """Set up a job `j` with 96 rows per step, and checkpoints for it."""

    def __init__(self, database: Database, store: Store) -> None:
        self.database, self.store, self.jobs = database, store, Jobs(database)

    def submit(self, type: str = TRAINING, status: str = "cancelled", **config: Any) -> None:
        config = {"model": "m", **config}
        self.jobs.submit(id="j", name="n", config=config, user="ann", organization="default", type=type, status="running")
        if status == "cancelled":
            self.jobs.cancel("j")
        elif status == "failed":
            self.jobs.fail("j", "no room")
        elif status == "completed":
            with self.database.write() as connection:
                self.jobs.complete(connection, "j", {}, 1.0)

    def record(self, **changed: Any) -> None:
        recipe = Recipe.named("smollm2-135m-lora").changed(changed)
        written = RunRecord(run_id="j", model="m", dataset="d@1", recipe=recipe, seed=1, environment=ENVIRONMENT)
        write_record(self.store, written, {})

    def checkpoint(self, step: int, loss: float | None = None, way: str = "") -> None:
        uri = f"{RUN}{way}/{step}"
        facts = {} if loss is None else {VALIDATION_LOSS_KEY: loss}
        self.store.put_manifest(uri, Manifest(kind="checkpoint", files=(), facts=facts))

    def logged(self, step: int) -> None:
        RunData(self.database).log_batch("j", metrics=[metric_point("train/loss", 1.0, step, 1)])

    def resume(self, **wish: Any) -> JobRecord:
        return resume_job(self.database, self.store, "j", Wish(**wish), "bob")

    def refusal(self, quota: Quota | None = None, **wish: Any) -> tuple[ErrorCode, str]:
        with pytest.raises(HanzoError) as refused:
            resume_job(self.database, self.store, "j", Wish(**wish), "bob", quota)
        return refused.value.code, refused.value.message

    def events(self) -> list[Event]:
        with self.database.read() as connection:
            return read_after(connection, 0, ("job.resumed",), 100)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    settings = Settings.load({"HANZO_ML_HOME": str(tmp_path)})
    database = Database(settings.database_url)
    migrate(database)
    yield House(database, Store(settings.store))
    database.close()


def test_resumed_failed_job_is_queued_and_its_event_is_written(house: House) -> None:
    house.submit(status="failed")
    started = house.jobs.read("j").started_at
    job = house.resume()
    assert (job.status, job.reason, job.ended_at, job.started_at) == ("queued", "", None, started)
    assert job.resumed == ResumeHistory(times=1)
    (event,) = house.events()
    assert event.payload.items() >= {"job_id": "j", "user_id": "bob", "resume_from": "latest", "gpus": None}.items()
    began = Runs(house.database).get("j").start_time
    house.jobs.start("j")
    run = Runs(house.database).get("j")
    assert (run.status, run.start_time, run.end_time) == ("running", began, None)
    house.jobs.cancel("j")
    assert house.resume().resumed.times == 2


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ("running", "job 'j' is running: cancel it first, to resume it with other settings"),
        ("completed", "job 'j' is completed, and its model exists: submit a new job to train with other settings"),
    ],
)
def test_resume_of_an_active_or_completed_job_is_refused(house: House, status: str, said: str) -> None:
    house.submit(status=status)
    code, message = house.refusal()
    assert code is ErrorCode.RESOURCE_CONFLICT and message.startswith(said)
    assert house.jobs.read("j").status == status and not house.events()


def test_trial_is_resumed_only_after_its_sweep_has_ended(house: House) -> None:
    found = Sweeps(house.database)
    identifier = found.start(sweep(), user="ann", organization="default").id
    house.submit(**{SWEEP_KEY: identifier})
    code, message = house.refusal()
    assert code is ErrorCode.RESOURCE_CONFLICT
    assert f"is a trial of sweep '{identifier}', which continues without it: resume it when that has ended" in message
    cancel_sweep(house.database, house.store, identifier)
    assert house.resume().status == "queued"


def test_resume_of_a_preparation_is_refused(house: House) -> None:
    house.submit(PREPARATION)
    assert "submit it again" in house.refusal()[1]


def test_command_resumes_only_without_changes(house: House) -> None:
    house.submit(COMMAND)
    for wish in ({"gpus": 2}, {"resume_from": "best"}, {"resume_from": 3}):
        code, message = house.refusal(**wish)
        assert code is ErrorCode.INVALID_PARAMETER_VALUE and "finds its checkpoints" in message
    assert house.resume().status == "queued"


def test_a_deleted_job_does_not_come_back(house: House) -> None:
    house.submit()
    house.jobs.delete("j")
    assert house.refusal() == (ErrorCode.RESOURCE_CONFLICT, "job 'j' is deleted: submit a new one")


def test_resume_from_a_step_without_checkpoint_is_rejected_with_the_available_steps(house: House) -> None:
    house.submit()
    code, message = house.refusal(resume_from=3)
    assert (code, message) == (ErrorCode.INVALID_PARAMETER_VALUE, "there is no checkpoint of step 3: there is no checkpoint")
    for step in (20, 4):
        house.checkpoint(step)
    said = "there are checkpoints of steps 4, 20"
    assert house.refusal(resume_from=3)[1] == f"there is no checkpoint of step 3: {said}"
    assert house.refusal(resume_from="best")[1] == f"no checkpoint was evaluated, so there is no best one: {said}"
    assert house.jobs.read("j").status == "cancelled"


class Pruned(Store):
    """Store whose oldest object is deleted concurrently, right after each listing."""

    def list(self, uri: str) -> list[str]:
        found = super().list(uri)
        self.remove(found[0])
        return found


def test_listing_skips_checkpoint_deleted_concurrently(house: House) -> None:
    """Regression: resuming at once failed while the cancelled program pruned old checkpoints."""
    house.submit()
    for step in (4, 8):
        house.checkpoint(step)
    house.store = Pruned(house.store.address)
    assert house.refusal(resume_from=4)[1].endswith("there are checkpoints of steps 8")


def test_resume_from_best_rewinds_to_its_step_and_settles_at_the_start(house: House) -> None:
    house.submit()
    house.record()
    for step, loss in ((10, 0.5), (20, 0.4), (40, 0.6)):
        house.checkpoint(step, loss)
    house.logged(45)
    job = house.resume(resume_from="best")
    assert job.resumed.sent_back == (Rewind(step=20),)
    house.logged(47)  # the cancelled program ends only now
    settle_rewind(house.database, house.jobs.start("j"))
    (settled,) = house.jobs.read("j").resumed.sent_back
    assert (settled.step, settled.done) == (20, 47) and settled.at
    house.logged(60)
    settle_rewind(house.database, house.jobs.read("j"))
    assert house.jobs.read("j").resumed.sent_back == (settled,), "the rest is of the way that it is on"


def test_repeated_rewind_finds_checkpoints_of_the_current_and_earlier_branches(house: House) -> None:
    """Train to 40, rewind to 20, train to 30, resume, rewind to 20 and 40."""
    house.submit()
    house.record()
    for step in (20, 40):
        house.checkpoint(step)
    house.resume(resume_from=20)
    house.checkpoint(30, way="/from-20")
    house.jobs.cancel("j")
    assert [back.step for back in house.resume().resumed.sent_back] == [20], "the newest is that of the way it is on"
    house.jobs.cancel("j")
    assert "steps 20, 30, 40" in house.refusal(resume_from=5)[1]
    assert house.resume(resume_from=20).resumed.sent_back[1:] == (Rewind(step=20),)
    house.jobs.cancel("j")
    last = house.resume(resume_from=40).resumed
    assert last.times == 4
    assert last.sent_back[2:] == (Rewind(step=40),)


def test_changed_number_of_gpus_persists_and_must_fit_the_recipe(house: House) -> None:
    house.submit()
    house.record(batch_size=4, gradient_accumulation=1)
    code, message = house.refusal(gpus=5)
    assert code is ErrorCode.INVALID_PARAMETER_VALUE and "use at most 4 processes" in message
    assert house.resume(gpus=3).resumed.gpus == 3
    house.jobs.fail("j", "again")
    assert house.resume().resumed.gpus == 3


def test_more_gpus_than_the_organization_s_quota_are_refused(house: House) -> None:
    house.submit()
    house.record(hardware={"gpus": 1}, gradient_accumulation=8)
    code, message = house.refusal(Quota(max_gpus=2), gpus=4)
    assert (
        code is ErrorCode.INVALID_PARAMETER_VALUE and "asks for 4 GPUs, and the quota of your organization is 2" in message
    )
    assert house.resume(gpus=2).resumed.gpus == 2
