"""Sensor decisions on the real graph and database are made exactly once."""

import os
from datetime import timedelta
from typing import Any

import dagster as dg
import pytest
from dagster._core.remote_origin import RegisteredCodeLocationOrigin, RemoteJobOrigin, RemoteRepositoryOrigin
from dagster._core.storage.tags import PRIORITY_TAG
from sqlalchemy import update

from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.training import ensure_job
from recipes.contracts.recipe import Recipe
from recipes.contracts.recovery_log import OutOfMemory, add_recovery_event
from recipes.storage.artifact_store import Store
from resources.compute.local.work_folder import QUEUED_START_FILE, QUEUED_UNTIL_FILE
from resources.datasets.deletion import delete_version
from resources.errors import HanzoError
from resources.lineage.run_record import RECORD_FILE, Environment, RunRecord, write_record
from resources.metadata.field_rules import MetricPoint
from resources.metadata.job_record import ResumeHistory
from resources.metadata.outbox import emit, now_ms, read_after
from resources.metadata.registry import deployments
from resources.metadata.registry.model_version_edits import ModelVersionEdits
from resources.metadata.registry.registered_models import RegisteredModels
from resources.metadata.registry.undeployment import undeploy
from resources.metadata.registry.version_lifecycle import ClientVersion
from resources.metadata.tables import events
from resources.metadata.tracking.run_data import RunData
from resources.monitoring.service_heartbeats import SENSORS_NAME
from sensors import retry_dead_runs as dead_runs
from sensors.cancel_terminated_jobs import cancel_terminated_jobs
from sensors.decisions.job_runs import PARTITION_TAG
from sensors.decisions.retry_policy import MAX_RETRIES, RETRIED_RUN_TAG, RETRIES_TAG, is_retried
from sensors.deploy_promotions import deploy_promotions
from sensors.evaluate_completed_jobs import evaluate_completed_jobs
from sensors.record_launched_runs import list_clicked_runs
from sensors.retry_dead_runs import retry_dead_runs
from sensors.split_new_versions import split_new_versions
from sensors.start_submitted_jobs import start_submitted_jobs
from sensors.stop_cancelled_jobs import stop_cancelled_jobs
from sensors.watch_training import check_training, watch_training
from sensors.withdraw_deployments import withdraw_deployments
from tests.resources.serving.gateway_process import Gateway, free_port
from tests.support.resources.model_versions import artifact
from tests.support.resources.model_versions import model as model_key
from tests.support.sensors.sensor_harness import MODEL, SensorHarness, failed_run, harness, keys, repository

__all__ = ["harness", "repository"]


# A dataset version is split.


def test_sensor_tick_sends_a_heartbeat(harness: SensorHarness) -> None:
    assert harness.plane.heartbeats.list() == []
    for _ in range(2):
        before = now_ms()
        harness.tick(start_submitted_jobs)
        (heard,) = harness.plane.heartbeats.list()
        assert (heard.name, heard.beat_at >= before) == (SENSORS_NAME, True)


def test_a_new_version_is_split_once(harness: SensorHarness) -> None:
    version = harness.dataset(split=False)
    (request,) = harness.tick(split_new_versions)
    assert keys(request) == [f"datasets/ellarin/{step}" for step in ("version", "train", "validation", "test")]
    assert request.tags["hanzo_ml/dataset_version"] == "ellarin@1"
    assert request.run_key == f"split-{version.id}"
    assert harness.tick(split_new_versions) == []


def test_reset_cursor_does_not_split_a_split_version_again(harness: SensorHarness) -> None:
    version = harness.dataset(split=False)
    (first,) = harness.tick(split_new_versions)
    harness.reset()
    (again,) = harness.tick(split_new_versions)
    assert again.run_key == first.run_key  # Dagster runs a key once
    harness.split(version)
    harness.reset()
    assert harness.tick(split_new_versions) == []


def test_a_dataset_without_a_definition_is_split_in_the_sandbox(harness: SensorHarness) -> None:
    harness.dataset("uploaded", split=False)
    (request,) = harness.tick(split_new_versions)
    assert keys(request)[1] == "datasets/sandbox/train"
    assert request.tags["hanzo_ml/dataset_version"] == "uploaded@1"


# A submitted job is started.


def test_a_submitted_job_starts_once_in_the_partition_of_its_run(harness: SensorHarness) -> None:
    harness.dataset()
    harness.submit("job-1")
    (request,) = harness.tick(start_submitted_jobs)
    assert (request.run_key, request.partition_key) == ("job-1", "job-1")
    assert keys(request) == [f"models/{MODEL}/checkpoint"]
    assert harness.instance.has_dynamic_partition(f"{MODEL}-runs", "job-1")
    # Until it has started it is requested again, under the run key that Dagster honours once.
    assert [request.run_key for request in harness.tick(start_submitted_jobs)] == ["job-1"]
    harness.plane.jobs.start("job-1")
    assert harness.tick(start_submitted_jobs) == []


@pytest.mark.parametrize("ended", ["running", "completed", "failed", "cancelled"])
def test_reset_cursor_does_not_restart_started_or_ended_jobs(harness: SensorHarness, ended: str) -> None:
    harness.dataset()
    harness.submit("job-1")
    harness.tick(start_submitted_jobs)
    if ended == "cancelled":
        harness.plane.jobs.cancel("job-1")
    elif ended == "failed":
        harness.plane.jobs.fail("job-1", "reason")
    elif ended == "completed":
        harness.complete("job-1")
    else:
        harness.plane.jobs.start("job-1")
    harness.reset()
    assert harness.tick(start_submitted_jobs) == []
    assert harness.plane.jobs.read("job-1").status == ended


@pytest.mark.requirement("A8")
def test_job_waits_for_its_splits_with_a_reason_and_then_starts(harness: SensorHarness) -> None:
    version = harness.dataset(split=False)
    harness.submit("job-1")
    assert harness.tick(start_submitted_jobs) == []
    assert harness.plane.jobs.read("job-1").reason == "waits for the checks and splits of ellarin@1"
    assert harness.tick(start_submitted_jobs) == []
    harness.split(version)
    (request,) = harness.tick(start_submitted_jobs)
    assert request.run_key == "job-1"


def test_job_shows_that_its_run_waits_in_the_dagster_queue(harness: SensorHarness) -> None:
    """It was queued without a reason while another one trained."""
    harness.dataset()
    harness.submit("job-1")
    harness.tick(start_submitted_jobs)
    assert harness.plane.jobs.read("job-1").reason == ""
    definition = harness.repository.get_implicit_job_def_for_assets([dg.AssetKey(["models", MODEL, "checkpoint"])])
    assert definition is not None
    harness.instance.create_run_for_job(
        definition,
        tags={"dagster/run_key": "job-1"},
        status=dg.DagsterRunStatus.QUEUED,
        remote_job_origin=RemoteJobOrigin(RemoteRepositoryOrigin(RegisteredCodeLocationOrigin("here"), "all"), "job"),
    )
    assert [request.run_key for request in harness.tick(start_submitted_jobs)] == ["job-1"], "in case it was not launched"
    assert harness.plane.jobs.read("job-1").reason == "waits for its turn: this machine runs 1 at a time"
    harness.plane.jobs.start("job-1")
    harness.tick(start_submitted_jobs)
    assert harness.plane.jobs.read("job-1").reason == ""


def test_waiting_job_does_not_block_later_jobs(harness: SensorHarness) -> None:
    harness.dataset()
    unsplit = harness.dataset("other", split=False)
    harness.submit("first")
    harness.submit("waits", dataset="other@1")
    harness.submit("after")
    assert [request.run_key for request in harness.tick(start_submitted_jobs)] == ["first", "after"]
    for run in ("first", "after"):
        harness.plane.jobs.start(run)
    assert harness.tick(start_submitted_jobs) == []
    harness.split(unsplit)
    assert [request.run_key for request in harness.tick(start_submitted_jobs)] == ["waits"]
    harness.plane.jobs.start("waits")
    harness.submit("new")
    assert [request.run_key for request in harness.tick(start_submitted_jobs)] == ["new"]


def test_waiting_job_does_not_block_a_job_behind_many_ended_ones(harness: SensorHarness) -> None:
    harness.dataset()
    harness.dataset("other", split=False)
    harness.submit("waits", dataset="other@1")
    for number in range(100):
        harness.submit(f"ended-{number}")
        harness.plane.jobs.cancel(f"ended-{number}")
    harness.submit("after")
    started = [request.run_key for _ in range(3) for request in harness.tick(start_submitted_jobs)]
    assert "after" in started


def test_a_job_of_an_unknown_model_fails_with_a_reason_that_says_what_to_do(harness: SensorHarness) -> None:
    harness.dataset()
    harness.submit("job-1", model="nobody")
    harness.submit("job-2")
    assert [request.run_key for request in harness.tick(start_submitted_jobs)] == ["job-2"]
    job = harness.plane.jobs.read("job-1")
    assert job.status == "failed"
    assert job.reason == "there is no model definition 'nobody': add hanzo_ml_assets/defs/nobody/defs.yaml"


def test_job_with_a_misspelled_model_fails_with_a_suggestion(harness: SensorHarness) -> None:
    harness.dataset()
    harness.submit("job-1", model="ellarin-asistant")
    assert harness.tick(start_submitted_jobs) == []
    assert "did you mean 'ellarin-assistant'?" in harness.plane.jobs.read("job-1").reason


def test_a_job_of_an_unknown_dataset_fails_with_a_reason_that_says_what_to_do(harness: SensorHarness) -> None:
    harness.submit("job-1")
    assert harness.tick(start_submitted_jobs) == []
    job = harness.plane.jobs.read("job-1")
    assert job.status == "failed" and "there is no dataset 'ellarin': create it with" in job.reason


@pytest.mark.parametrize("split", [True, False])
def test_job_without_dataset_pins_the_current_version(harness: SensorHarness, split: bool) -> None:
    """While it waits, no newer version replaces its dataset, which cannot be deleted."""
    pinned = harness.dataset(split=split)
    harness.submit("job-1")
    harness.tick(start_submitted_jobs)
    harness.dataset(text=" else")
    harness.tick(start_submitted_jobs)
    assert harness.plane.jobs.read("job-1").config["dataset"] == pinned.reference
    with pytest.raises(HanzoError, match="job job-1 refer"):
        delete_version(harness.plane.database, harness.plane.store, pinned.id, "ann")


def test_sandbox_job_starts_in_the_sandbox_partition(harness: SensorHarness) -> None:
    harness.dataset("mine")
    harness.submit("job-1", model="sandbox", name="my-model", dataset="mine@1")
    (request,) = harness.tick(start_submitted_jobs)
    assert keys(request) == ["models/sandbox/checkpoint"]
    assert harness.instance.has_dynamic_partition("sandbox-runs", "job-1")


def test_sandbox_job_named_like_a_definition_fails(harness: SensorHarness) -> None:
    """Its version would be registered as the definition's own, judged by the sandbox's gate."""
    harness.dataset("mine")
    harness.submit("job-1", model="sandbox", name=MODEL, dataset="mine@1")
    assert harness.tick(start_submitted_jobs) == []
    job = harness.plane.jobs.read("job-1")
    assert (job.status, f"submit it with --model {MODEL}" in job.reason) == ("failed", True), job.reason


def test_resumed_sandbox_job_named_like_a_definition_still_starts(harness: SensorHarness) -> None:
    """Jobs cannot be renamed: its checkpoints would have become useless."""
    harness.dataset("mine")
    harness.submit("job-1", model="sandbox", name=MODEL, dataset="mine@1")
    jobs = harness.plane.jobs
    jobs.start("job-1")
    jobs.fail("job-1", "its node was lost")
    jobs.resume("job-1", ResumeHistory(times=1), {})
    (request,) = harness.tick(start_submitted_jobs)
    assert keys(request) == ["models/sandbox/checkpoint"]


def test_requested_asset_selection_exists_in_the_graph(harness: SensorHarness) -> None:
    harness.dataset(split=False)
    harness.dataset("mine")
    harness.submit("job-1", model="sandbox", name="x", dataset="mine@1")
    harness.complete("job-1")
    harness.submit("job-2", model="sandbox", name="x", dataset="mine@1")
    sensors = (split_new_versions, start_submitted_jobs, evaluate_completed_jobs)
    requests = [request for sensor in sensors for request in harness.tick(sensor)]
    assert len(requests) == 3
    for request in requests:
        for key in request.asset_selection or []:
            assert harness.repository.asset_graph.has(key)


# A completed job is evaluated.


@pytest.mark.requirement("M1", "M8")
def test_a_completed_job_is_evaluated_registered_and_exported_once(harness: SensorHarness) -> None:
    harness.submit("job-1")
    harness.complete("job-1")
    (request,) = harness.tick(evaluate_completed_jobs)
    assert keys(request) == [f"models/{MODEL}/{step}" for step in ("evaluation", "version", "merged", "gguf")]
    assert (request.run_key, request.partition_key) == ("evaluate-job-1", "job-1")
    assert int(request.tags[PRIORITY_TAG]) > 0, "it does not wait for trainings that were submitted meanwhile"
    assert harness.tick(evaluate_completed_jobs) == []


def test_reset_cursor_does_not_reevaluate_exported_versions(harness: SensorHarness) -> None:
    harness.submit("job-1")
    harness.complete("job-1")
    harness.register("job-1", exported=False)
    harness.reset()
    assert len(harness.tick(evaluate_completed_jobs)) == 1
    with harness.plane.database.write() as connection:
        version = harness.plane.registry.get(model_key(MODEL), 1, connection)
        harness.plane.registry.add_artifacts(connection, version, {"gguf": artifact("gguf")})
    harness.reset()
    assert harness.tick(evaluate_completed_jobs) == []


def test_exported_sandbox_job_is_not_evaluated_again(harness: SensorHarness) -> None:
    harness.submit("job-1", model="sandbox", name="my-model")
    harness.complete("job-1")
    harness.register("job-1", "my-model")
    assert harness.tick(evaluate_completed_jobs) == []


def test_a_failed_or_cancelled_job_is_not_evaluated(harness: SensorHarness) -> None:
    harness.submit("job-1")
    harness.plane.jobs.fail("job-1", "reason")
    harness.submit("job-2")
    harness.plane.jobs.cancel("job-2")
    assert harness.tick(evaluate_completed_jobs) == []


# A promoted version is deployed.


@pytest.mark.requirement("P5")
def test_a_promotion_to_production_is_deployed_once(harness: SensorHarness) -> None:
    harness.register("run-1")
    seq = harness.promote(1)
    (request,) = harness.tick(deploy_promotions)
    assert keys(request) == [f"models/{MODEL}/deployment"]
    assert (request.run_key, request.partition_key) == (f"deploy-{seq}", "run-1")
    (event,) = harness.asset_events
    assert event.asset_key.path == ["models", MODEL, "promotion"] and event.partition == "run-1"
    assert harness.tick(deploy_promotions) == []


def test_promotion_to_another_stage_deploys_nothing(harness: SensorHarness) -> None:
    harness.register("run-1")
    harness.promote(1, stage="archived")
    assert harness.tick(deploy_promotions) == []


def test_client_version_in_production_is_not_deployed_and_does_not_block_others(harness: SensorHarness) -> None:
    RegisteredModels(harness.plane.database).create(model_key(MODEL))
    harness.plane.registry.create(model_key(MODEL), ClientVersion(source="runs:/elsewhere/model", created_by="ann"))
    harness.promote(1)
    harness.register("run-1")
    seq = harness.promote(2)
    assert [request.run_key for request in harness.tick(deploy_promotions)] == [f"deploy-{seq}"]


def test_promotion_of_a_deleted_version_is_skipped(harness: SensorHarness) -> None:
    for run in ("run-1", "run-2"):
        harness.register(run)
    harness.promote(1)
    seq = harness.promote(2)
    ModelVersionEdits(harness.plane.database).delete(model_key(MODEL), 1)
    assert [request.run_key for request in harness.tick(deploy_promotions)] == [f"deploy-{seq}"]


def test_undeployed_version_is_withdrawn_when_the_engine_is_reachable(
    harness: SensorHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    monkeypatch.setenv("HANZO_ML_ENGINE_PORT", str(port))
    harness.plane.database.close()
    harness.plane = ControlPlane()  # settings are read once
    harness.register("run-1")
    seq = harness.promote(1)
    harness.begin_deployment(1, seq, "serving")
    undeploy(harness.plane.database, model_key(MODEL), user="ann")

    def status() -> str:
        with harness.plane.database.read() as connection:
            found = deployments.find_by_promotion(connection, seq)
        assert found is not None
        return found.status

    harness.tick(withdraw_deployments)
    assert status() == "withdrawing", "an engine that is away would serve it again as it comes back"
    gateway = Gateway(harness.folder / "engine", port)
    try:
        harness.tick(withdraw_deployments)
    finally:
        gateway.kill()
    assert status() == "withdrawn"
    ModelVersionEdits(harness.plane.database).delete(model_key(MODEL), 1)


@pytest.mark.parametrize("status", ["serving", "failed"])
def test_reset_cursor_does_not_redeploy(harness: SensorHarness, status: str) -> None:
    harness.register("run-1")
    seq = harness.promote(1)
    harness.tick(deploy_promotions)
    harness.begin_deployment(1, seq, status)
    harness.reset()
    assert harness.tick(deploy_promotions) == []


def test_interrupted_deployment_is_requested_again_under_the_same_run_key(harness: SensorHarness) -> None:
    harness.register("run-1")
    seq = harness.promote(1)
    (first,) = harness.tick(deploy_promotions)
    harness.begin_deployment(1, seq, "deploying")
    harness.reset()
    (again,) = harness.tick(deploy_promotions)
    assert again.run_key == first.run_key


def test_only_the_latest_of_two_promotions_is_deployed(harness: SensorHarness) -> None:
    for run in ("run-1", "run-2"):
        harness.register(run)
    harness.promote(1)
    second = harness.promote(2)
    assert [request.run_key for request in harness.tick(deploy_promotions)] == [f"deploy-{second}"]


def test_rollback_to_an_earlier_version_is_a_new_deployment(harness: SensorHarness) -> None:
    for run in ("run-1", "run-2"):
        harness.register(run)
    for number in (1, 2):
        harness.begin_deployment(number, harness.promote(number), "serving")
    back = harness.promote(1)
    assert [request.run_key for request in harness.tick(deploy_promotions)] == [f"deploy-{back}"]


# A run that failed for good marks its job as failed.


@pytest.mark.parametrize(("steps", "status"), [(("checkpoint",), "failed"), (("merged", "gguf"), "completed")])
def test_permanently_failed_run_is_reported_once(harness: SensorHarness, steps: tuple[str, ...], status: str) -> None:
    harness.submit("job-1")
    harness.plane.jobs.start("job-1") if status == "failed" else harness.complete("job-1")
    run = harness.instance.get_run_by_id(failed_run(harness, steps, "job-1"))
    assert run is not None
    for _ in range(2):
        assert not is_retried(harness.instance, run, harness.plane)
    job = harness.plane.jobs.read("job-1")
    assert job.status == status
    assert run.run_id in job.reason
    with harness.plane.database.read() as connection:
        failures = read_after(connection, 0, types=["job.failed", "evaluation.failed"])
    assert [event.payload["error"] for event in failures] == [job.reason]


@pytest.mark.parametrize("failed", ["older", "newer"])
def test_failed_run_does_not_fail_a_job_that_another_run_serves(harness: SensorHarness, failed: str) -> None:
    harness.submit("job-1")
    harness.plane.jobs.start("job-1")
    other = dg.DagsterRunStatus.STARTED if failed == "newer" else dg.DagsterRunStatus.FAILURE
    runs = [failed_run(harness, ("checkpoint",), "job-1", status) for status in (other, dg.DagsterRunStatus.FAILURE)]
    run = harness.instance.get_run_by_id(runs[failed == "newer"])
    assert run is not None
    assert not is_retried(harness.instance, run, harness.plane)
    assert harness.plane.jobs.read("job-1").status == "running"


def test_failed_run_of_a_missing_job_does_not_block_others(harness: SensorHarness) -> None:
    for job in ("job-1", "job-2"):
        harness.submit(job)
        harness.plane.jobs.start(job)
        failed_run(harness, ("checkpoint",), job)
        failed_run(harness, ("checkpoint",), f"gone-{job}")
    assert harness.tick(retry_dead_runs) == []
    assert [harness.plane.jobs.read(job).status for job in ("job-1", "job-2")] == ["failed", "failed"]


# A cancelled job is stopped.


def test_cancelled_job_without_run_is_skipped(harness: SensorHarness) -> None:
    harness.submit("job-1")
    harness.plane.jobs.cancel("job-1")
    assert harness.tick(stop_cancelled_jobs) == []
    assert not str(harness.cursors["stop_cancelled_jobs"]).startswith("0")


# All of them.


@pytest.mark.parametrize("cursor", [None, "", "0", "not a number"])
def test_missing_or_invalid_cursor_starts_at_the_first_event(harness: SensorHarness, cursor: str | None) -> None:
    harness.dataset(split=False)
    harness.cursors = {split_new_versions.name: cursor}
    assert len(harness.tick(split_new_versions)) == 1


def test_job_whose_model_was_renamed_is_not_evaluated_again(harness: SensorHarness) -> None:
    harness.submit("job-1")
    harness.complete("job-1")
    harness.register("job-1")
    RegisteredModels(harness.plane.database).rename(model_key(MODEL), "another")
    assert harness.tick(evaluate_completed_jobs) == []


def test_cursor_never_moves_backwards_without_new_events(harness: SensorHarness) -> None:
    sensors = (split_new_versions, evaluate_completed_jobs, deploy_promotions, stop_cancelled_jobs)
    with harness.plane.database.write() as connection:
        newest = emit(connection, "models", "model.updated", "m", {})
    harness.cursors = {sensor.name: str(newest) for sensor in sensors}
    for _ in range(2):
        for sensor in sensors:
            assert harness.tick(sensor) == []
            assert str(harness.cursors[sensor.name]).split("/")[0] == str(newest)


@pytest.mark.requirement("Y5", "Y7")
@pytest.mark.slow
def test_recovery_events_and_stalls_of_a_running_job_are_reported_once(harness: SensorHarness) -> None:
    """A recovery, then a stall: one event and tag each, over any ticks."""
    harness.submit("run-1")
    harness.plane.jobs.start("run-1")
    assert harness.tick(watch_training) == []  # it has no record yet: nothing to check
    recipe = Recipe.named("smollm2-135m-lora")
    environment = Environment(git_commit="none", git_dirty=False, lock_sha256="none", python="3.11")
    record = RunRecord(run_id="run-1", model=MODEL, dataset="d@1", recipe=recipe, seed=1, environment=environment)
    write_record(harness.plane.store, record, {})
    incident = OutOfMemory(step=5, batch_size=2, gradient_accumulation=2)
    add_recovery_event(harness.plane.store, "s3://hanzo-ml/checkpoints/run-1", incident)
    harness.plane.store.put_bytes("s3://hanzo-ml/checkpoints/run-1/4/manifest.json", b"{}")
    job, now = harness.plane.jobs.read("run-1"), now_ms()
    data = RunData(harness.plane.database)
    data.log_batch("run-1", metrics=[MetricPoint("train/loss", 2.0, 1, now)])
    for minutes in (1, 10, 20, 20, 30, 600, 700):
        check_training(job, harness.plane, now + minutes * 60_000)
    harness.tick(watch_training)
    with harness.plane.database.read() as connection:
        alerts = [event for event in read_after(connection, 0) if event.type.startswith("job.") and event.key == "run-1"][2:]
    assert [event.type for event in alerts] == ["job.out_of_memory", "job.stalled", "job.checkpoint_stale"]
    assert alerts[0].payload["batch_size"] == 2
    assert set(data.tags("run-1")) >= {"health/incident_1", "health/stalled", "health/checkpoint_stale"}
    data.log_batch("run-1", metrics=[MetricPoint("train/loss", 1.9, 2, now + 701 * 60_000)])
    check_training(job, harness.plane, now + 720 * 60_000)  # it continued, and stalls a second time
    with harness.plane.database.read() as connection:
        assert [event.type for event in read_after(connection, alerts[-1].seq, ["job.stalled"])] == ["job.stalled"]


def test_a_job_that_waits_for_gpus_is_not_stalled(harness: SensorHarness) -> None:
    """It was reported as stalled and its checkpoints as late while it waited."""
    harness.submit("run-1")
    harness.plane.jobs.start("run-1")
    environment = Environment(git_commit="none", git_dirty=False, lock_sha256="none", python="3.11")
    recipe = Recipe.named("smollm2-135m-lora")
    record = RunRecord(run_id="run-1", model=MODEL, dataset="d@1", recipe=recipe, seed=1, environment=environment)
    write_record(harness.plane.store, record, {})
    job, now = harness.plane.jobs.read("run-1"), now_ms()
    logged = MetricPoint("train/loss", 2.0, 1, now - 600 * 60_000)
    RunData(harness.plane.database).log_batch("run-1", metrics=[logged])
    waits = harness.plane.settings.home / "jobs" / "run-1" / "train" / QUEUED_START_FILE
    waits.parent.mkdir(parents=True)
    waits.touch()
    with harness.plane.database.write() as connection:
        connection.execute(update(events).values(created_at=now - 700 * 60_000))

    def alert_types() -> list[str]:
        check_training(job, harness.plane, now_ms())
        with harness.plane.database.read() as connection:
            return [event.type for event in read_after(connection, 0, ["job.stalled", "job.checkpoint_stale"])]

    assert alert_types() == []
    waits.rename(waits.with_name(QUEUED_UNTIL_FILE))
    os.utime(waits.with_name(QUEUED_UNTIL_FILE))
    assert alert_types() == [], "it has just got them"
    os.utime(waits.with_name(QUEUED_UNTIL_FILE), times=(0, now / 1000 - 20 * 60))
    assert alert_types() == ["job.stalled"]


@pytest.mark.parametrize("spoilt", ["record", "checkpoint", "incidents"])
def test_unreadable_training_record_does_not_block_watching_other_jobs(
    harness: SensorHarness, monkeypatch: pytest.MonkeyPatch, spoilt: str
) -> None:
    """One such job blocked all others.

    The record is of another release, or retention removed a checkpoint that was just listed.
    """
    store, recipe = harness.plane.store, Recipe.named("smollm2-135m-lora")
    environment = Environment(git_commit="none", git_dirty=False, lock_sha256="none", python="3.11")
    for id in ("run-1", "run-2"):
        harness.submit(id)
        harness.plane.jobs.start(id)
        record = RunRecord(run_id=id, model=MODEL, dataset="d@1", recipe=recipe, seed=1, environment=environment)
        write_record(store, record, {})
        add_recovery_event(
            store, f"s3://hanzo-ml/checkpoints/{id}", OutOfMemory(step=5, batch_size=2, gradient_accumulation=2)
        )
    if spoilt == "record":
        (harness.folder / "record").mkdir()
        (harness.folder / "record" / RECORD_FILE).write_text('{"run_id": "run-1"}')
        store.publish(harness.folder / "record", "s3://hanzo-ml/runs/run-1/record", "run")
    elif spoilt == "incidents":
        store.put_bytes("s3://hanzo-ml/checkpoints/run-1/incidents.json", b'{"entries": [{"kind": "of another release"}]}')
    else:
        listed = Store.list

        def pruned(self: Store, uri: str) -> list[str]:
            found = listed(self, uri)
            return [*found, f"{uri}/4/manifest.json"] if uri.endswith("run-1") else found

        monkeypatch.setattr(Store, "list", pruned)
    harness.tick(watch_training)
    with harness.plane.database.read() as connection:
        reported = [event.key for event in read_after(connection, 0, ["job.out_of_memory"])]
    assert reported == (["run-1", "run-2"] if spoilt == "checkpoint" else ["run-2"])


@pytest.mark.requirement("I4")
@pytest.mark.parametrize(
    ("policy", "schedule", "minutes"),
    [
        ({}, {}, 90),
        ({}, {"preemptible": True}, 30),
        ({}, {"checkpoint_interval": "10m"}, 15),
        ({"interval": "2h"}, {}, 180),
    ],
)
def test_checkpoint_is_reported_late_after_one_and_a_half_of_the_jobs_interval(
    harness: SensorHarness, policy: dict[str, Any], schedule: dict[str, Any], minutes: int
) -> None:
    """After 90 minutes of an hour's interval, or half an hour for preemptible nodes.

    A checkpoint without a manifest does not count.
    """
    recipe = Recipe.named("smollm2-135m-lora").changed({"checkpoint": policy})
    environment = Environment(git_commit="none", git_dirty=False, lock_sha256="none", python="3.11")
    harness.submit("run-1", schedule=schedule)
    harness.plane.jobs.start("run-1")
    record = RunRecord(run_id="run-1", model=MODEL, dataset="d@1", recipe=recipe, seed=1, environment=environment)
    write_record(harness.plane.store, record, {})
    data, job, now = RunData(harness.plane.database), harness.plane.jobs.read("run-1"), now_ms()
    late = ["job.checkpoint_stale"]

    def stale_alerts(after: int) -> list[str]:
        data.log_batch("run-1", metrics=[MetricPoint("train/loss", 2.0, after, now + after * 60_000)])  # avoids a stall
        check_training(job, harness.plane, now + after * 60_000)
        with harness.plane.database.read() as connection:
            return [event.type for event in read_after(connection, 0, late)]

    def arrive(name: str) -> None:
        uri = f"s3://hanzo-ml/checkpoints/run-1/4/{name}"
        harness.plane.store.put_bytes(uri, b"{}")
        path = harness.plane.store.local_path(uri)
        assert path is not None
        os.utime(path, (now / 1000 + minutes * 60,) * 2)

    stale_alerts(0)
    assert stale_alerts(minutes - 1) == []
    arrive("model.safetensors")
    assert stale_alerts(minutes + 1) == late
    arrive("manifest.json")
    assert stale_alerts(minutes + 2) == stale_alerts(2 * minutes - 1) == late
    assert stale_alerts(2 * minutes + 1) == late * 2


@pytest.mark.parametrize(
    ("status", "before", "pause", "tried"),
    [
        ("", 0, 60, 1),
        ("deploying", 0, 60, 1),
        ("failed", 0, 60, 0),
        ("serving", 0, 60, 0),
        ("deploying", 1, 60, 0),  # not yet
        ("deploying", MAX_RETRIES - 1, 0, 1),
        ("deploying", MAX_RETRIES, 0, 0),
    ],
)
def test_interrupted_deployment_is_retried_and_a_decided_one_is_not(
    harness: SensorHarness, monkeypatch: pytest.MonkeyPatch, status: str, before: int, pause: int, tried: int
) -> None:
    """The store failed during the download, or the database before or after the engine's swap."""
    harness.submit("job-1")
    promotion = harness.promote(harness.register("job-1").version)
    if status:
        harness.begin_deployment(1, promotion, status)
    monkeypatch.setattr(dead_runs, "DEPLOYMENT_RETRY_PAUSE", timedelta(minutes=pause))
    run = failed_run(harness, ("deployment",), "job-1", **{RETRIES_TAG: str(before)})
    requests = harness.tick(retry_dead_runs)
    assert [(request.partition_key, request.tags[RETRIED_RUN_TAG]) for request in requests] == [("job-1", run)] * tried


def test_training_launched_in_dagster_is_listed_as_queued_and_starts_once(harness: SensorHarness) -> None:
    """It became a job only when its run had begun, hours later."""
    harness.dataset()
    click(harness, "clicked", {"parameters": {"max_steps": 3}})
    click(harness, "job-1", {})
    harness.submit("job-1")
    harness.tick(list_clicked_runs)
    harness.tick(list_clicked_runs)
    job = harness.plane.jobs.read("clicked")
    assert (job.status, job.user_id) == ("queued", "dagster")
    assert job.config == {"name": MODEL, "model": MODEL, "parameters": {"max_steps": 3}}
    assert harness.plane.jobs.read("job-1").user_id == "u", "that is recorded already"
    assert [request.run_key for request in harness.tick(start_submitted_jobs)] == ["job-1"], "the other has its run"
    assert harness.plane.jobs.read("clicked").reason == "waits for its turn in Dagster's queue"
    ensure_job("clicked", MODEL, {"parameters": {"max_steps": 3}}, harness.plane)
    assert harness.plane.jobs.start("clicked").status == "running"


def test_training_fails_when_its_queued_run_is_deleted_in_dagster(harness: SensorHarness) -> None:
    run = click(harness, "clicked", {})
    harness.tick(list_clicked_runs)
    harness.instance.delete_run(run.run_id)
    assert harness.tick(start_submitted_jobs) == []
    job = harness.plane.jobs.read("clicked")
    assert job.status == "failed" and "its run was deleted in Dagster" in job.reason


def test_training_is_cancelled_when_its_queued_run_is_terminated_in_dagster(harness: SensorHarness) -> None:
    run = click(harness, "clicked", {})
    harness.tick(list_clicked_runs)
    harness.instance.report_run_canceled(run)
    assert harness.tick(start_submitted_jobs) == []
    harness.tick(cancel_terminated_jobs)
    assert harness.plane.jobs.read("clicked").status == "cancelled"


def click(harness: SensorHarness, partition: str, given: dict[str, Any]) -> dg.DagsterRun:
    """Create a queued run of the training, as the launchpad does."""
    key = dg.AssetKey(["models", MODEL, "checkpoint"])
    definition = harness.repository.get_implicit_job_def_for_assets([key])
    assert definition is not None
    return harness.instance.create_run_for_job(
        definition,
        run_config={"ops": {key.to_python_identifier(): {"config": given}}} if given else {},
        asset_selection=frozenset({key}),
        tags={PARTITION_TAG: partition},
        status=dg.DagsterRunStatus.QUEUED,
        remote_job_origin=RemoteJobOrigin(RemoteRepositoryOrigin(RegisteredCodeLocationOrigin("here"), "all"), "job"),
    )
