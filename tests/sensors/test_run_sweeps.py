"""Sweeps on a real database and Dagster instance: trials end as jobs do.

The tests set states and metrics.
"""

import threading
from collections.abc import Iterator

import dagster as dg
import pytest
import yaml

from hanzo_ml_assets.training_plan import starting_weights
from resources.hpo.sweep_advance import advance_sweep
from resources.hpo.sweep_config import SweepConfig
from resources.hpo.sweep_step import decide_next_step
from resources.hpo.sweeps import Sweeps
from resources.hpo.trial import Observation
from resources.metadata.database import Database
from resources.metadata.outbox import read_after
from resources.metadata.tracking.metrics import Metrics
from resources.metadata.tracking.run_data import RunData
from resources.metadata.tracking.runs import Runs
from sensors.evaluate_completed_jobs import evaluate_completed_jobs
from sensors.run_sweeps import run_sweeps
from sensors.start_submitted_jobs import start_submitted_jobs
from sensors.stop_cancelled_jobs import stop_cancelled_jobs
from tests.resources.hpo.sweep_files import SPECIFIED, sweep
from tests.support.postgres_server import migrated_sqlite, postgres, postgres_url, sqlite_url
from tests.support.sensors.sensor_harness import DATASET, MODEL, SensorHarness, harness, keys, repository
from tests.support.sensors.sweep_search import Cut, Killed, Search

__all__ = ["harness", "migrated_sqlite", "postgres", "postgres_url", "repository", "sqlite_url"]


@pytest.mark.requirement("K6")
def test_a_sweep_runs_to_its_end_as_jobs_and_child_runs(harness: SensorHarness) -> None:
    harness.dataset("colours")
    search = Search(harness, max_trials=3)
    assert len(search.look().trials) == 2, "no more than max_concurrent_trials"
    first, second = search.trials
    assert [request.run_key for request in harness.tick(start_submitted_jobs)] == [first.job_id, second.job_id]
    runs, data = Runs(harness.plane.database), RunData(harness.plane.database)
    parent = runs.get(search.id)
    for trial in search.trials:
        assert data.tags(trial.job_id)["mlflow.parentRunId"] == search.id
        assert runs.get(trial.job_id).experiment_id == parent.experiment_id
        assert harness.plane.jobs.read(trial.job_id).config["parameters"]["learning_rate"] == trial.params["learning_rate"]
    search.complete(0, 0.5)
    search.look()
    assert search.statuses() == ["completed", "running", "running"]
    harness.plane.jobs.fail(second.job_id, "out of memory")
    search.complete(2, 0.25)
    search.look()
    found = search.sweeps.snapshot(search.id)
    assert search.statuses() == ["completed", "failed", "completed"]
    assert (found.sweep.status, runs.get(search.id).status) == ("completed", "completed")
    assert found.trials[1].reason == "out of memory"
    (completed,) = search.events("sweep.completed")
    assert completed["best"]["trial"] == 2 and completed["best"]["value"] == 0.25
    points = Metrics(harness.plane.database).history(search.id, "eval/loss", 10).points
    assert [(point.step, point.value) for point in points] == [(0, 0.5), (1, 0.25)]
    for name in ("history", "parallel_coordinates"):
        page = harness.plane.store.get_bytes(f"s3://hanzo-ml/runs/{search.id}/artifacts/plots/{name}.html").decode()
        assert "Best: trial 2 (completed): 0.25" in page


@pytest.mark.parametrize(("direction", "best"), [("minimize", 0.25), ("maximize", 0.5)])
def test_the_run_of_a_sweep_shows_the_best_value(harness: SensorHarness, direction: str, best: float) -> None:
    """It showed the value of the trial with the highest number, however bad."""
    objective = {"metric": "eval/loss", "direction": direction}
    search = Search(harness, max_trials=3, max_concurrent_trials=3, objective=objective)
    search.look()
    for number, value in ((2, 0.4), (0, 0.25), (1, 0.5)):
        search.complete(number, value)
        search.look()
    (shown,) = Metrics(harness.plane.database).latest(search.id)
    assert (shown.key, shown.value) == ("eval/loss", best)


@pytest.mark.parametrize(("direction", "best"), [("minimize", 0), ("maximize", 1)])
def test_only_the_best_trial_of_a_sweep_is_evaluated(harness: SensorHarness, direction: str, best: int) -> None:
    search = Search(harness, max_trials=2, objective={"metric": "eval/loss", "direction": direction})
    search.look()
    search.complete(0, 0.5)
    assert harness.tick(evaluate_completed_jobs) == []
    search.complete(1, 0.7)
    search.look()
    (request,) = harness.tick(evaluate_completed_jobs)
    assert request.partition_key == search.trials[best].job_id
    assert keys(request)[0] == "models/sandbox/evaluation"
    assert harness.tick(evaluate_completed_jobs) == []


def test_completed_trial_is_pruned_retroactively_at_the_step_where_it_stalled(harness: SensorHarness) -> None:
    """A tick in time would have pruned it."""
    search = Search(harness, max_trials=2, early_stopping={"patience": 1, "min_delta": 0.0})
    search.look()
    for step, value in ((10, 0.4), (20, 0.5)):
        search.log(0, value, step)
    search.complete(0, 0.1)
    search.complete(1, 0.3)
    search.look()
    assert search.statuses() == ["pruned", "completed"]
    assert (search.trials[0].value, search.trials[0].step) == (0.5, 20)
    (completed,) = search.events("sweep.completed")
    assert completed["best"]["trial"] == completed["best_completed"]["trial"] == 1


def test_halving_compares_a_trial_once_with_trials_that_reached_the_rung_earlier(harness: SensorHarness) -> None:
    """Ordered by time, not by the order of evaluation.

    A step that is logged again keeps its first time.
    """
    search = Search(harness, strategy="successive_halving", max_trials=3, max_concurrent_trials=3)
    search.look()
    for time, number, value in ((1, 2, 0.5), (2, 1, 0.4), (3, 0, 0.45)):
        search.log(number, value, 10, time)
    search.look()
    assert search.statuses() == ["pruning", "running", "running"]
    assert (search.trials[0].value, search.trials[0].step) == (0.45, 10)
    search.log(2, 0.5, 10, time=9)
    search.look()
    assert search.statuses() == ["pruned", "running", "running"]


def test_stalled_trial_is_cancelled_and_frees_its_slot_when_its_run_has_ended(harness: SensorHarness) -> None:
    early = {"patience": 2, "min_delta": 0.01}
    search = Search(harness, max_trials=2, max_concurrent_trials=1, early_stopping=early)
    search.look()
    job = search.trials[0].job_id
    definition = harness.repository.get_implicit_job_def_for_assets([dg.AssetKey(["models", "sandbox", "checkpoint"])])
    assert definition is not None
    run = harness.instance.create_run_for_job(
        definition, tags={"dagster/partition": job}, status=dg.DagsterRunStatus.STARTED
    )
    harness.plane.jobs.start(job)
    for step, value in ((10, 0.5), (20, 0.5), (30, 0.6)):
        search.log(0, 10 / step, step)  # it was killed then: its second run's values count
        search.log(0, value, step, time=2)
        search.look()
        assert (search.statuses() == ["pruning"]) == (step == 30), "a step that was logged again is one step"
    assert harness.plane.jobs.read(job).status == "cancelled"
    assert "no improvement" in harness.plane.jobs.read(job).reason
    search.look()
    assert search.statuses() == ["pruning"], "its processes may still be there"
    harness.instance.report_run_canceled(run)
    search.look()
    assert search.statuses() == ["pruned", "running"]


def test_sweep_without_dataset_pins_one_version_for_all_trials(harness: SensorHarness) -> None:
    pinned = harness.dataset(DATASET)
    search = Search(harness, base_config={"model": MODEL}, max_trials=2, max_concurrent_trials=1)
    search.look()
    harness.dataset(DATASET, text=" else")
    search.complete(0, 0.5)
    search.look()
    configs = [harness.plane.jobs.read(trial.job_id).config for trial in search.trials]
    assert [(config["model"], config["dataset"]) for config in configs] == [(MODEL, pinned.reference)] * 2


@pytest.mark.parametrize(
    ("base", "words"),
    [
        ({"model": "nobody"}, "there is no model definition 'nobody': add "),
        ({"model": "zen-8b", "method": "lora", "dataset": "colours"}, "'zen-8b': did you mean 'zen-7b'?"),
    ],
)
def test_sweep_of_a_missing_definition_fails_before_its_first_trial(
    harness: SensorHarness, base: dict[str, str], words: str
) -> None:
    """Each of fifty trials was created, and failed."""
    harness.dataset("colours")
    found = Search(harness, base_config=base).look()
    assert (found.sweep.status, found.trials) == ("failed", ()) and words in found.sweep.reason


def test_sweep_of_an_unpinned_base_model_fails_before_its_first_trial(harness: SensorHarness) -> None:
    """The specification's own: fifty trials failed for the same reason."""
    harness.dataset("instruction-v2")
    specified = SweepConfig.model_validate(yaml.safe_load(SPECIFIED))
    identifier = Sweeps(harness.plane.database).start(specified, user="ann", organization="default").id
    harness.tick(run_sweeps)
    found = Sweeps(harness.plane.database).snapshot(identifier)
    assert (found.sweep.status, found.trials) == ("failed", ())
    assert "'zen-7b-lora': base model zenlm/zen-7b is not pinned: set base_model to" in found.sweep.reason
    pinned = {"uri": "file:///models/zen-7b", "sha256": "0" * 64}
    base = {"dataset": "instruction-v2", "model": "zen-7b", "base_model": pinned}
    assert len(Search(harness, base_config=base).look().trials) == 2


def test_sweep_with_one_invalid_choice_still_starts_its_trials(harness: SensorHarness) -> None:
    harness.dataset(DATASET)
    base = {"model": MODEL, "distributed": {"strategy": "deepspeed_zero2", "gpus_per_node": 2, "backend": "gloo"}}
    space = {"optimizer": {"type": "choice", "values": ["adamw_8bit", "adamw"]}}  # DeepSpeed only supports adamw
    assert len(Search(harness, base_config=base, search_space=space).look().trials) == 2


def test_sweep_named_like_a_definition_fails_before_its_first_trial(harness: SensorHarness) -> None:
    """Each of its trials was started, and failed because of the name."""
    harness.dataset()
    search = Search(harness, experiment=MODEL)
    found = search.look()
    assert (found.sweep.status, found.trials) == ("failed", ())
    assert found.sweep.reason.startswith(f"experiment '{MODEL}' is the name of a definition, whose gate its versions pass")
    assert f"base_config.model: {MODEL}" in found.sweep.reason
    own = Search(harness, experiment=MODEL, base_config={"model": MODEL, "dataset": DATASET})
    assert len(own.look().trials) == 2


def test_population_member_starts_from_the_weights_of_a_better_one(harness: SensorHarness) -> None:
    pbt = {"population": 3, "generations": 2}
    search = Search(harness, strategy="pbt", pbt=pbt, max_concurrent_trials=3)
    search.look()
    for number, value in enumerate((0.5, 0.3, 0.4)):
        assert starting_weights(harness.plane.jobs.read(search.trials[number].job_id)) == {}
        search.complete(number, value)
    search.look()
    assert [trial.start_from for trial in search.trials] == [None] * 3 + [1, 1, 2]
    for trial in search.trials[3:]:
        job = harness.plane.jobs.read(trial.job_id)
        assert starting_weights(job)["start"].digest == f"{trial.start_from:064d}"
        assert job.config["parameters"]["max_steps"] == 20
    assert search.trials[3].params["learning_rate"] != search.trials[1].params["learning_rate"]


def test_a_cancelled_sweep_starts_nothing_more_and_its_jobs_are_stopped(harness: SensorHarness) -> None:
    search = Search(harness)
    search.look()
    search.complete(0, 0.5)
    search.look()
    search.cancel()
    assert search.statuses() == ["completed", "cancelled", "cancelled"]
    assert [harness.plane.jobs.read(trial.job_id).status for trial in search.trials[1:]] == ["cancelled"] * 2
    assert Runs(harness.plane.database).get(search.id).status == "cancelled"
    before = search.sweeps.snapshot(search.id)
    assert search.look() == before
    assert harness.tick(stop_cancelled_jobs) == []


def test_cancelling_a_trials_job_ends_only_that_trial(harness: SensorHarness) -> None:
    search = Search(harness, max_trials=2, max_concurrent_trials=1)
    search.look()
    harness.plane.jobs.cancel(search.trials[0].job_id)
    search.look()
    search.look()
    assert search.statuses() == ["cancelled", "running"]


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest) -> Iterator[Database]:
    url = request.getfixturevalue({"sqlite": "sqlite_url", "postgresql": "postgres_url"}[request.param])
    database = Database(url)
    yield database
    database.close()


def test_concurrent_sweep_steps_start_each_trial_once(database: Database, harness: SensorHarness) -> None:
    """Two daemons, or one restarted after a kill: each of many ticks is atomic."""
    found = Sweeps(database)
    identifier = found.start(sweep(max_trials=4, max_concurrent_trials=4), user="ann", organization="default").id
    together, problems = threading.Barrier(4), []

    def look() -> None:
        together.wait()
        for _ in range(3):
            try:
                advance_sweep(database, harness.plane.store, identifier, lambda job: True)
            except Exception as error:
                problems.append(error)

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert [trial.number for trial in found.snapshot(identifier).trials] == [0, 1, 2, 3]
    with database.read() as connection:
        events = read_after(connection, 0, types=["trial.started", "job.submitted"], limit=100)
    assert sorted(each.type for each in events) == ["job.submitted"] * 4 + ["trial.started"] * 4


def test_step_decided_on_an_outdated_snapshot_is_not_applied(harness: SensorHarness) -> None:
    search = Search(harness, max_trials=2, max_concurrent_trials=2)
    before = search.look()
    search.complete(0, 0.5)
    step = decide_next_step(search.id, before.sweep.config, before.trials, {0: Observation("failed", "x")}, 1)
    assert search.sweeps.apply_step(before, step) is False
    assert search.statuses() == ["running", "running"]


@pytest.mark.requirement("K7")
def test_kill_at_any_statement_neither_loses_nor_duplicates_trials(harness: SensorHarness) -> None:
    """Interrupts the step that starts trials before its statement 1, 2, 3, ..."""
    search = Search(harness, max_trials=2)
    for place in range(200):
        try:
            with Cut(harness.plane.database, place):
                advance_sweep(harness.plane.database, harness.plane.store, search.id, lambda job: True)
            break
        except Killed:
            assert search.trials == ()
            assert search.events("job.submitted", "trial.started") == []
    assert place > 10, "it was cut in many places"
    assert len(search.trials) == 2
    assert len(search.events("job.submitted")) == len(search.events("trial.started")) == 2
