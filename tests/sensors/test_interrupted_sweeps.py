"""Sweeps whose parts are deleted, renamed, unavailable or interrupted continue, or end with a reason."""

import json
import math
import threading
from collections.abc import Iterator
from functools import partial

import pytest
from sqlalchemy import text

from resources.errors import HanzoError
from resources.hpo.sweep_advance import advance_sweep, cancel_sweep
from resources.hpo.sweeps import Sweeps
from resources.jobs.resume import Wish, resume_job
from resources.metadata.database import Database
from resources.metadata.field_rules import metric_point
from resources.metadata.jobs import Jobs
from resources.metadata.outbox import emit
from resources.metadata.tracking.experiments import Experiments
from resources.metadata.tracking.run_data import RunData
from resources.metadata.tracking.runs import Runs
from resources.stack.detached_process import lock_folder
from sensors.evaluate_completed_jobs import evaluate_completed_jobs
from sensors.start_submitted_jobs import start_submitted_jobs
from tests.resources.hpo.sweep_files import sweep
from tests.support.postgres_server import migrated_sqlite, postgres, postgres_url
from tests.support.sensors.sensor_harness import MODEL, SensorHarness, harness, repository
from tests.support.sensors.sweep_search import Cut, Killed, Search

__all__ = ["harness", "migrated_sqlite", "postgres", "postgres_url", "repository"]

RESUME = "`hanzo-ml job resume {}` trains it to its end, and evaluates and registers it"
EARLY = {"patience": 1, "min_delta": 0.01}


def delete_parent(harness: SensorHarness, search: Search, what: str) -> None:
    runs = Runs(harness.plane.database)
    if what == "run":
        runs.delete(search.id)
    else:
        Experiments(harness.plane.database).delete(runs.get(search.id).experiment_id)


@pytest.mark.parametrize("what", ["run", "experiment"])
def test_sweep_whose_run_is_deleted_is_cancelled_with_the_reason(harness: SensorHarness, what: str) -> None:
    search = Search(harness, max_concurrent_trials=3)
    search.look()
    search.complete(0, 0.5)
    harness.plane.jobs.start(search.trials[1].job_id)
    delete_parent(harness, search, what)
    found = search.look()
    assert (found.sweep.status, found.sweep.reason) == ("cancelled", "its run, or its experiment, was deleted")
    assert search.statuses() == ["completed", "cancelled", "cancelled"]
    assert [harness.plane.jobs.read(trial.job_id).status for trial in search.trials[1:]] == ["cancelled"] * 2
    assert Runs(harness.plane.database).get(search.id).status == "cancelled"
    assert search.look() == found


@pytest.mark.parametrize("what", ["run", "experiment"])
def test_a_sweep_whose_run_is_deleted_can_be_cancelled(harness: SensorHarness, what: str) -> None:
    search = Search(harness)
    search.look()
    search.complete(0, 0.5)
    delete_parent(harness, search, what)
    search.cancel()
    assert search.sweeps.snapshot(search.id).sweep.status == "cancelled"
    assert search.statuses() == ["completed", "cancelled"]


def test_trials_stay_in_the_parents_experiment_when_it_is_renamed(harness: SensorHarness) -> None:
    search = Search(harness)
    runs = Runs(harness.plane.database)
    parent = runs.get(search.id)
    Experiments(harness.plane.database).rename(parent.experiment_id, "another name")
    search.look()
    assert {runs.get(trial.job_id).experiment_id for trial in search.trials} == {parent.experiment_id}


def test_ended_trials_keep_their_status_when_the_sweep_is_cancelled(harness: SensorHarness) -> None:
    search = Search(harness, max_trials=4, max_concurrent_trials=4)
    search.look()
    search.complete(0, 0.5)
    harness.plane.jobs.fail(search.trials[1].job_id, "out of memory")
    harness.plane.jobs.cancel(search.trials[2].job_id, "by ann")
    search.cancel()
    assert search.statuses() == ["completed", "failed", "cancelled", "cancelled"]
    assert search.trials[0].value == 0.5
    assert [trial.reason for trial in search.trials[1:]] == ["out of memory", "by ann", "its sweep was cancelled"]
    page = harness.plane.store.get_bytes(f"s3://hanzo-ml/runs/{search.id}/artifacts/plots/history.html").decode()
    assert "Best: trial 0 (completed): 0.5" in page
    with pytest.raises(HanzoError, match="is cancelled already"):
        search.cancel()


def stop_early(search: Search, number: int, value: float) -> None:
    """Stop it early: its last evaluation is no better than the one before."""
    search.harness.plane.jobs.start(search.trials[number].job_id)
    for step in (10, 20):
        search.log(number, value, step)
    search.look()
    search.look()
    assert search.statuses()[number] == "pruned"


def test_best_completed_trial_is_evaluated_instead_of_a_better_pruned_one(harness: SensorHarness) -> None:
    search = Search(harness, max_trials=2, early_stopping=EARLY)
    search.look()
    stop_early(search, 0, 0.1)
    search.complete(1, 0.5)
    best = search.trials[0].job_id
    assert search.look().sweep.reason == f"trial 0 is the best, and was stopped early: {RESUME.format(best)}"
    (completed,) = search.events("sweep.completed")
    assert (completed["best"]["trial"], completed["best_completed"]["trial"]) == (0, 1)
    (request,) = harness.tick(evaluate_completed_jobs)
    assert request.partition_key == search.trials[1].job_id


def test_sweep_with_only_pruned_trials_reports_that_there_is_no_model(harness: SensorHarness) -> None:
    search = Search(harness, max_trials=1, early_stopping=EARLY)
    search.look()
    stop_early(search, 0, 0.1)
    found, best = search.look().sweep, search.trials[0].job_id
    assert found.status == "completed" and "were stopped early, so that there is no model" in found.reason
    assert found.reason.endswith(f"; trial 0 is the best: {RESUME.format(best)}")
    assert harness.tick(evaluate_completed_jobs) == []


@pytest.mark.parametrize("ends", ["completed", "cancelled"])
def test_pruned_trial_can_be_resumed_to_its_end_and_is_evaluated(harness: SensorHarness, ends: str) -> None:
    """The best trial was stopped because it had converged: a model required another training."""
    search = Search(harness, max_trials=2, early_stopping=EARLY)
    search.look()
    stop_early(search, 0, 0.1)
    stopped = search.trials[0].job_id
    resume = partial(resume_job, harness.plane.database, harness.plane.store, stopped, Wish(), "ann")
    with pytest.raises(
        HanzoError, match=f"of sweep '{search.id}', which continues without it: resume it when that has ended"
    ):
        resume()
    if ends == "cancelled":
        search.cancel()
    else:
        search.complete(1, 0.5)
        search.look()
    harness.tick(evaluate_completed_jobs)
    assert resume().status == "queued"
    search.complete(0, 0.05)
    (request,) = harness.tick(evaluate_completed_jobs)
    assert request.partition_key == stopped
    search.look()
    assert (search.statuses()[0], search.trials[0].value) == ("pruned", 0.1), "the sweep stays as it ended"


def test_trial_keeps_its_slot_while_its_orphaned_program_runs(harness: SensorHarness) -> None:
    search = Search(harness, max_trials=2, max_concurrent_trials=1)
    search.look()
    job = search.trials[0].job_id
    harness.plane.jobs.start(job)
    folder = harness.plane.settings.home / "jobs" / job / "train"
    folder.mkdir(parents=True)
    with lock_folder(folder):  # as the program holds it until its end
        harness.plane.jobs.cancel(job)
        search.look()
        search.look()
        assert search.statuses() == ["cancelling"]
    search.look()
    assert search.statuses() == ["cancelled", "running"]


def test_sweep_with_a_missing_dataset_fails_with_the_reason(harness: SensorHarness) -> None:
    search = Search(harness, base_config={"model": MODEL}, max_trials=1)
    search.look()
    assert len(search.trials) == 1
    assert harness.tick(start_submitted_jobs) == []
    found = search.look()
    assert "there is no dataset 'ellarin'" in found.trials[0].reason
    assert found.sweep.status == "failed" and "there is no dataset 'ellarin'" in found.sweep.reason


def test_unreadable_sweep_does_not_block_or_hide_others(harness: SensorHarness) -> None:
    broken, whole = Search(harness), Search(harness)
    with harness.plane.database.write() as connection:
        row = {"id": broken.id, "config": json.dumps({"strategy": "luck"})}
        connection.execute(text("UPDATE sweeps SET config = :config WHERE id = :id"), row)
    assert len(whole.look().trials) == 2
    assert [found.id for found in whole.sweeps.page("default")[0]] == [whole.id]


def test_storage_failure_for_plots_does_not_block_trials(harness: SensorHarness) -> None:
    search = Search(harness, max_trials=3, max_concurrent_trials=1)
    search.look()
    files = f"s3://hanzo-ml/runs/{search.id}"
    harness.plane.store.put_bytes(files, b"")  # so that no folder of that name can exist
    search.complete(0, 0.5)
    search.look()
    assert search.statuses() == ["completed", "running"]
    harness.plane.store.delete(files)
    search.complete(1, 0.25)
    search.look()
    page = harness.plane.store.get_bytes(f"{files}/artifacts/plots/history.html").decode()
    assert page.count("<title>trial ") == 2
    search.complete(2, 0.75)
    assert search.look().sweep.status == "completed"
    page = harness.plane.store.get_bytes(f"{files}/artifacts/plots/history.html").decode()
    assert page.count("<title>trial ") == 3


def test_kill_at_any_statement_of_the_last_step_completes_the_sweep_once_with_plots(harness: SensorHarness) -> None:
    search = Search(harness, max_trials=2)
    search.look()
    search.complete(0, 0.5)
    search.complete(1, 0.25)
    for place in range(200):
        try:
            with Cut(harness.plane.database, place):
                advance_sweep(harness.plane.database, harness.plane.store, search.id, lambda job: True)
            break
        except Killed:
            assert search.events("sweep.completed") == []
    assert place > 10, "it was cut in many places"
    assert search.statuses() == ["completed", "completed"]
    assert len(search.events("trial.completed")) == 2 and len(search.events("sweep.completed")) == 1
    page = harness.plane.store.get_bytes(f"s3://hanzo-ml/runs/{search.id}/artifacts/plots/history.html").decode()
    assert "Best: trial 1 (completed): 0.25" in page


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_trial_with_nonfinite_objective_fails(harness: SensorHarness, value: float) -> None:
    """Through the database, which stores an infinity as the largest double."""
    search = Search(harness, max_trials=1)
    search.look()
    job = search.trials[0].job_id
    harness.plane.jobs.start(job)
    RunData(harness.plane.database).log_metric(job, metric_point("eval/loss", value, 40, 1))
    with harness.plane.database.write() as connection:
        harness.plane.jobs.complete(connection, job, {}, 1.0)
    found = search.look()
    assert search.statuses() == ["failed"] and "it diverged: the last 'eval/loss'" in found.trials[0].reason


def test_trials_have_low_priority_and_the_schedule_of_their_sweep(harness: SensorHarness) -> None:
    base = sweep().base_config
    search = Search(harness, base_config={**base, "schedule": {"max_duration": "2h", "preemptible": True}})
    search.look()
    schedule = harness.plane.jobs.read(search.trials[0].job_id).schedule
    assert (schedule.max_duration, schedule.preemptible, schedule.priority) == ("2h", True, "low")


def test_each_population_generation_uses_a_new_seed(harness: SensorHarness) -> None:
    pbt = {"population": 2, "generations": 2}
    search = Search(harness, strategy="pbt", pbt=pbt, max_concurrent_trials=2)
    search.look()
    for number in (0, 1):
        search.complete(number, 0.5)
    search.look()
    seeds = [harness.plane.jobs.read(trial.job_id).config["parameters"].get("seed") for trial in search.trials]
    assert seeds == [None, None, 43, 43], "the recipe's own seed is 42"


@pytest.fixture
def database(postgres_url: str) -> Iterator[Database]:
    database = Database(postgres_url)
    yield database
    database.close()


@pytest.mark.parametrize("ends", ["sweep is cancelled", "trials are stopped"])
@pytest.mark.parametrize("other", ["a job", "a trial's run", "the sweep's run"])
def test_concurrent_job_and_run_changes_do_not_deadlock_with_sweep_steps(
    database: Database, harness: SensorHarness, ends: str, other: str
) -> None:
    """PostgreSQL: a row and the event order were locked in opposite order."""
    found, jobs, data = Sweeps(database), Jobs(database), RunData(database)
    config = sweep(max_trials=3, max_concurrent_trials=3, early_stopping=EARLY)
    identifier = found.start(config, user="ann", organization="default").id
    advance_sweep(database, harness.plane.store, identifier, lambda job: True)
    trials = found.snapshot(identifier).trials
    for trial in trials:
        jobs.start(trial.job_id)
        for step in (10, 20):
            data.log_metric(trial.job_id, metric_point("eval/loss", 0.5, step, 1))
    last = trials[-1].job_id
    problems: list[Exception] = []

    def end() -> None:
        try:
            if ends == "sweep is cancelled":
                cancel_sweep(database, harness.plane.store, identifier)
            else:
                advance_sweep(database, harness.plane.store, identifier, lambda job: True)
        except Exception as error:
            problems.append(error)

    thread = threading.Thread(target=end)
    with database.write() as connection:
        held = {"a job": ("jobs", last), "a trial's run": ("runs", last), "the sweep's run": ("runs", identifier)}
        table, row = held[other]
        connection.execute(text(f"SELECT id FROM {table} WHERE id = :id FOR NO KEY UPDATE"), {"id": row})
        thread.start()
        thread.join(0.7)  # by now it waits for the row
        assert thread.is_alive()
        emit(connection, "jobs", "test", row, {})
    thread.join(30)
    assert problems == []
    statuses = {trial.status for trial in found.snapshot(identifier).trials}
    assert statuses == ({"cancelled"} if ends == "sweep is cancelled" else {"pruning"})
