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


class ResumeScenario:
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
def scenario(tmp_path: Path) -> Iterator[ResumeScenario]:
    settings = Settings.load({"HANZO_ML_HOME": str(tmp_path)})
    database = Database(settings.database_url)
    migrate(database)
    yield ResumeScenario(database, Store(settings.store))
    database.close()


def test_resumed_failed_job_is_queued_and_its_event_is_written(scenario: ResumeScenario) -> None:
    scenario.submit(status="failed")
    started = scenario.jobs.read("j").started_at
    job = scenario.resume()
    assert (job.status, job.reason, job.ended_at, job.started_at) == ("queued", "", None, started)
    assert job.resumed == ResumeHistory(times=1)
    (event,) = scenario.events()
    assert event.payload.items() >= {"job_id": "j", "user_id": "bob", "resume_from": "latest", "gpus": None}.items()
    began = Runs(scenario.database).get("j").start_time
    scenario.jobs.start("j")
    run = Runs(scenario.database).get("j")
    assert (run.status, run.start_time, run.end_time) == ("running", began, None)
    scenario.jobs.cancel("j")
    assert scenario.resume().resumed.times == 2


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ("running", "job 'j' is running: cancel it first, to resume it with other settings"),
        ("completed", "job 'j' is completed, and its model exists: submit a new job to train with other settings"),
    ],
)
def test_resume_of_an_active_or_completed_job_is_refused(scenario: ResumeScenario, status: str, said: str) -> None:
    scenario.submit(status=status)
    code, message = scenario.refusal()
    assert code is ErrorCode.RESOURCE_CONFLICT and message.startswith(said)
    assert scenario.jobs.read("j").status == status and not scenario.events()


def test_trial_is_resumed_only_after_its_sweep_has_ended(scenario: ResumeScenario) -> None:
    found = Sweeps(scenario.database)
    identifier = found.start(sweep(), user="ann", organization="default").id
    scenario.submit(**{SWEEP_KEY: identifier})
    code, message = scenario.refusal()
    assert code is ErrorCode.RESOURCE_CONFLICT
    assert f"is a trial of sweep '{identifier}', which continues without it: resume it when that has ended" in message
    cancel_sweep(scenario.database, scenario.store, identifier)
    assert scenario.resume().status == "queued"


def test_resume_of_a_preparation_is_refused(scenario: ResumeScenario) -> None:
    scenario.submit(PREPARATION)
    assert "submit it again" in scenario.refusal()[1]


def test_command_resumes_only_without_changes(scenario: ResumeScenario) -> None:
    scenario.submit(COMMAND)
    for wish in ({"gpus": 2}, {"resume_from": "best"}, {"resume_from": 3}):
        code, message = scenario.refusal(**wish)
        assert code is ErrorCode.INVALID_PARAMETER_VALUE and "finds its checkpoints" in message
    assert scenario.resume().status == "queued"


def test_a_deleted_job_does_not_come_back(scenario: ResumeScenario) -> None:
    scenario.submit()
    scenario.jobs.delete("j")
    assert scenario.refusal() == (ErrorCode.RESOURCE_CONFLICT, "job 'j' is deleted: submit a new one")


def test_resume_from_a_step_without_checkpoint_is_rejected_with_the_available_steps(scenario: ResumeScenario) -> None:
    scenario.submit()
    code, message = scenario.refusal(resume_from=3)
    assert (code, message) == (ErrorCode.INVALID_PARAMETER_VALUE, "there is no checkpoint of step 3: there is no checkpoint")
    for step in (20, 4):
        scenario.checkpoint(step)
    said = "there are checkpoints of steps 4, 20"
    assert scenario.refusal(resume_from=3)[1] == f"there is no checkpoint of step 3: {said}"
    assert scenario.refusal(resume_from="best")[1] == f"no checkpoint was evaluated, so there is no best one: {said}"
    assert scenario.jobs.read("j").status == "cancelled"


class Pruned(Store):
    """Store whose oldest object is deleted concurrently, right after each listing."""

    def list(self, uri: str) -> list[str]:
        found = super().list(uri)
        self.remove(found[0])
        return found


def test_listing_skips_checkpoint_deleted_concurrently(scenario: ResumeScenario) -> None:
    """Regression: resuming at once failed while the cancelled program pruned old checkpoints."""
    scenario.submit()
    for step in (4, 8):
        scenario.checkpoint(step)
    scenario.store = Pruned(scenario.store.address)
    assert scenario.refusal(resume_from=4)[1].endswith("there are checkpoints of steps 8")


def test_resume_from_best_rewinds_to_its_step_and_settles_at_the_start(scenario: ResumeScenario) -> None:
    scenario.submit()
    scenario.record()
    for step, loss in ((10, 0.5), (20, 0.4), (40, 0.6)):
        scenario.checkpoint(step, loss)
    scenario.logged(45)
    job = scenario.resume(resume_from="best")
    assert job.resumed.sent_back == (Rewind(step=20),)
    scenario.logged(47)  # the cancelled program ends only now
    settle_rewind(scenario.database, scenario.jobs.start("j"))
    (settled,) = scenario.jobs.read("j").resumed.sent_back
    assert (settled.step, settled.done) == (20, 47) and settled.at
    scenario.logged(60)
    settle_rewind(scenario.database, scenario.jobs.read("j"))
    assert scenario.jobs.read("j").resumed.sent_back == (settled,), "the rest is of the way that it is on"


def test_repeated_rewind_finds_checkpoints_of_the_current_and_earlier_branches(scenario: ResumeScenario) -> None:
    """Train to 40, rewind to 20, train to 30, resume, rewind to 20 and 40."""
    scenario.submit()
    scenario.record()
    for step in (20, 40):
        scenario.checkpoint(step)
    scenario.resume(resume_from=20)
    scenario.checkpoint(30, way="/from-20")
    scenario.jobs.cancel("j")
    assert [back.step for back in scenario.resume().resumed.sent_back] == [20], "the newest is that of the way it is on"
    scenario.jobs.cancel("j")
    assert "steps 20, 30, 40" in scenario.refusal(resume_from=5)[1]
    assert scenario.resume(resume_from=20).resumed.sent_back[1:] == (Rewind(step=20),)
    scenario.jobs.cancel("j")
    last = scenario.resume(resume_from=40).resumed
    assert last.times == 4
    assert last.sent_back[2:] == (Rewind(step=40),)


def test_changed_number_of_gpus_persists_and_must_fit_the_recipe(scenario: ResumeScenario) -> None:
    scenario.submit()
    scenario.record(batch_size=4, gradient_accumulation=1)
    code, message = scenario.refusal(gpus=5)
    assert code is ErrorCode.INVALID_PARAMETER_VALUE and "use at most 4 processes" in message
    assert scenario.resume(gpus=3).resumed.gpus == 3
    scenario.jobs.fail("j", "again")
    assert scenario.resume().resumed.gpus == 3


def test_more_gpus_than_the_organization_s_quota_are_refused(scenario: ResumeScenario) -> None:
    scenario.submit()
    scenario.record(hardware={"gpus": 1}, gradient_accumulation=8)
    code, message = scenario.refusal(Quota(max_gpus=2), gpus=4)
    assert (
        code is ErrorCode.INVALID_PARAMETER_VALUE and "asks for 4 GPUs, and the quota of your organization is 2" in message
    )
    assert scenario.resume(gpus=2).resumed.gpus == 2
