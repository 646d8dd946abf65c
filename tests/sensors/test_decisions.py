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
from tests.support.sensors.sensor_house import MODEL, House, failed_run, house, keys, repository

__all__ = ["house", "repository"]


# A dataset version is split.


def test_sensor_tick_sends_a_heartbeat(house: House) -> None:
    assert house.plane.heartbeats.list() == []
    for _ in range(2):
        before = now_ms()
        house.tick(start_submitted_jobs)
        (heard,) = house.plane.heartbeats.list()
        assert (heard.name, heard.beat_at >= before) == (SENSORS_NAME, True)


def test_a_new_version_is_split_once(house: House) -> None:
    version = house.dataset(split=False)
    (request,) = house.tick(split_new_versions)
    assert keys(request) == [f"datasets/ellarin/{step}" for step in ("version", "train", "validation", "test")]
    assert request.tags["hanzo_ml/dataset_version"] == "ellarin@1"
    assert request.run_key == f"split-{version.id}"
    assert house.tick(split_new_versions) == []


def test_reset_cursor_does_not_split_a_split_version_again(house: House) -> None:
    version = house.dataset(split=False)
    (first,) = house.tick(split_new_versions)
    house.reset()
    (again,) = house.tick(split_new_versions)
    assert again.run_key == first.run_key  # Dagster runs a key once
    house.split(version)
    house.reset()
    assert house.tick(split_new_versions) == []


def test_a_dataset_without_a_definition_is_split_in_the_sandbox(house: House) -> None:
    house.dataset("uploaded", split=False)
    (request,) = house.tick(split_new_versions)
    assert keys(request)[1] == "datasets/sandbox/train"
    assert request.tags["hanzo_ml/dataset_version"] == "uploaded@1"


# A submitted job is started.


def test_a_submitted_job_starts_once_in_the_partition_of_its_run(house: House) -> None:
    house.dataset()
    house.submit("job-1")
    (request,) = house.tick(start_submitted_jobs)
    assert (request.run_key, request.partition_key) == ("job-1", "job-1")
    assert keys(request) == [f"models/{MODEL}/checkpoint"]
    assert house.instance.has_dynamic_partition(f"{MODEL}-runs", "job-1")
    # Until it has started it is requested again, under the run key that Dagster honours once.
    assert [request.run_key for request in house.tick(start_submitted_jobs)] == ["job-1"]
    house.plane.jobs.start("job-1")
    assert house.tick(start_submitted_jobs) == []


@pytest.mark.parametrize("ended", ["running", "completed", "failed", "cancelled"])
def test_reset_cursor_does_not_restart_started_or_ended_jobs(house: House, ended: str) -> None:
    house.dataset()
    house.submit("job-1")
    house.tick(start_submitted_jobs)
    if ended == "cancelled":
        house.plane.jobs.cancel("job-1")
    elif ended == "failed":
        house.plane.jobs.fail("job-1", "reason")
    elif ended == "completed":
        house.complete("job-1")
    else:
        house.plane.jobs.start("job-1")
    house.reset()
    assert house.tick(start_submitted_jobs) == []
    assert house.plane.jobs.read("job-1").status == ended


@pytest.mark.requirement("A8")
def test_job_waits_for_its_splits_with_a_reason_and_then_starts(house: House) -> None:
    version = house.dataset(split=False)
    house.submit("job-1")
    assert house.tick(start_submitted_jobs) == []
    assert house.plane.jobs.read("job-1").reason == "waits for the checks and splits of ellarin@1"
    assert house.tick(start_submitted_jobs) == []
    house.split(version)
    (request,) = house.tick(start_submitted_jobs)
    assert request.run_key == "job-1"


def test_job_shows_that_its_run_waits_in_the_dagster_queue(house: House) -> None:
    """It was queued without a reason while another one trained."""
    house.dataset()
    house.submit("job-1")
    house.tick(start_submitted_jobs)
    assert house.plane.jobs.read("job-1").reason == ""
    definition = house.repository.get_implicit_job_def_for_assets([dg.AssetKey(["models", MODEL, "checkpoint"])])
    assert definition is not None
    house.instance.create_run_for_job(
        definition,
        tags={"dagster/run_key": "job-1"},
        status=dg.DagsterRunStatus.QUEUED,
        remote_job_origin=RemoteJobOrigin(RemoteRepositoryOrigin(RegisteredCodeLocationOrigin("here"), "all"), "job"),
    )
    assert [request.run_key for request in house.tick(start_submitted_jobs)] == ["job-1"], "in case it was not launched"
    assert house.plane.jobs.read("job-1").reason == "waits for its turn: this machine runs 1 at a time"
    house.plane.jobs.start("job-1")
    house.tick(start_submitted_jobs)
    assert house.plane.jobs.read("job-1").reason == ""


def test_waiting_job_does_not_block_later_jobs(house: House) -> None:
    house.dataset()
    unsplit = house.dataset("other", split=False)
    house.submit("first")
    house.submit("waits", dataset="other@1")
    house.submit("after")
    assert [request.run_key for request in house.tick(start_submitted_jobs)] == ["first", "after"]
    for run in ("first", "after"):
        house.plane.jobs.start(run)
    assert house.tick(start_submitted_jobs) == []
    house.split(unsplit)
    assert [request.run_key for request in house.tick(start_submitted_jobs)] == ["waits"]
    house.plane.jobs.start("waits")
    house.submit("new")
    assert [request.run_key for request in house.tick(start_submitted_jobs)] == ["new"]


def test_waiting_job_does_not_block_a_job_behind_many_ended_ones(house: House) -> None:
    house.dataset()
    house.dataset("other", split=False)
    house.submit("waits", dataset="other@1")
    for number in range(100):
        house.submit(f"ended-{number}")
        house.plane.jobs.cancel(f"ended-{number}")
    house.submit("after")
    started = [request.run_key for _ in range(3) for request in house.tick(start_submitted_jobs)]
    assert "after" in started


def test_a_job_of_an_unknown_model_fails_with_a_reason_that_says_what_to_do(house: House) -> None:
    house.dataset()
    house.submit("job-1", model="nobody")
    house.submit("job-2")
    assert [request.run_key for request in house.tick(start_submitted_jobs)] == ["job-2"]
    job = house.plane.jobs.read("job-1")
    assert job.status == "failed"
    assert job.reason == "there is no model definition 'nobody': add hanzo_ml_assets/defs/nobody/defs.yaml"


def test_job_with_a_misspelled_model_fails_with_a_suggestion(house: House) -> None:
    house.dataset()
    house.submit("job-1", model="ellarin-asistant")
    assert house.tick(start_submitted_jobs) == []
    assert "did you mean 'ellarin-assistant'?" in house.plane.jobs.read("job-1").reason


def test_a_job_of_an_unknown_dataset_fails_with_a_reason_that_says_what_to_do(house: House) -> None:
    house.submit("job-1")
    assert house.tick(start_submitted_jobs) == []
    job = house.plane.jobs.read("job-1")
    assert job.status == "failed" and "there is no dataset 'ellarin': create it with" in job.reason


@pytest.mark.parametrize("split", [True, False])
def test_job_without_dataset_pins_the_current_version(house: House, split: bool) -> None:
    """While it waits, no newer version replaces its dataset, which cannot be deleted."""
    pinned = house.dataset(split=split)
    house.submit("job-1")
    house.tick(start_submitted_jobs)
    house.dataset(text=" else")
    house.tick(start_submitted_jobs)
    assert house.plane.jobs.read("job-1").config["dataset"] == pinned.reference
    with pytest.raises(HanzoError, match="job job-1 refer"):
        delete_version(house.plane.database, house.plane.store, pinned.id, "ann")


def test_sandbox_job_starts_in_the_sandbox_partition(house: House) -> None:
    house.dataset("mine")
    house.submit("job-1", model="sandbox", name="my-model", dataset="mine@1")
    (request,) = house.tick(start_submitted_jobs)
    assert keys(request) == ["models/sandbox/checkpoint"]
    assert house.instance.has_dynamic_partition("sandbox-runs", "job-1")


def test_sandbox_job_named_like_a_definition_fails(house: House) -> None:
    """Its version would be registered as the definition's own, judged by the sandbox's gate."""
    house.dataset("mine")
    house.submit("job-1", model="sandbox", name=MODEL, dataset="mine@1")
    assert house.tick(start_submitted_jobs) == []
    job = house.plane.jobs.read("job-1")
    assert (job.status, f"submit it with --model {MODEL}" in job.reason) == ("failed", True), job.reason


def test_resumed_sandbox_job_named_like_a_definition_still_starts(house: House) -> None:
    """Jobs cannot be renamed: its checkpoints would have become useless."""
    house.dataset("mine")
    house.submit("job-1", model="sandbox", name=MODEL, dataset="mine@1")
    jobs = house.plane.jobs
    jobs.start("job-1")
    jobs.fail("job-1", "its node was lost")
    jobs.resume("job-1", ResumeHistory(times=1), {})
    (request,) = house.tick(start_submitted_jobs)
    assert keys(request) == ["models/sandbox/checkpoint"]


def test_requested_asset_selection_exists_in_the_graph(house: House) -> None:
    house.dataset(split=False)
    house.dataset("mine")
    house.submit("job-1", model="sandbox", name="x", dataset="mine@1")
    house.complete("job-1")
    house.submit("job-2", model="sandbox", name="x", dataset="mine@1")
    sensors = (split_new_versions, start_submitted_jobs, evaluate_completed_jobs)
    requests = [request for sensor in sensors for request in house.tick(sensor)]
    assert len(requests) == 3
    for request in requests:
        for key in request.asset_selection or []:
            assert house.repository.asset_graph.has(key)


# A completed job is evaluated.


@pytest.mark.requirement("M1", "M8")
def test_a_completed_job_is_evaluated_registered_and_exported_once(house: House) -> None:
    house.submit("job-1")
    house.complete("job-1")
    (request,) = house.tick(evaluate_completed_jobs)
    assert keys(request) == [f"models/{MODEL}/{step}" for step in ("evaluation", "version", "merged", "gguf")]
    assert (request.run_key, request.partition_key) == ("evaluate-job-1", "job-1")
    assert int(request.tags[PRIORITY_TAG]) > 0, "it does not wait for trainings that were submitted meanwhile"
    assert house.tick(evaluate_completed_jobs) == []


def test_reset_cursor_does_not_reevaluate_exported_versions(house: House) -> None:
    house.submit("job-1")
    house.complete("job-1")
    house.register("job-1", exported=False)
    house.reset()
    assert len(house.tick(evaluate_completed_jobs)) == 1
    with house.plane.database.write() as connection:
        version = house.plane.registry.get(model_key(MODEL), 1, connection)
        house.plane.registry.add_artifacts(connection, version, {"gguf": artifact("gguf")})
    house.reset()
    assert house.tick(evaluate_completed_jobs) == []


def test_exported_sandbox_job_is_not_evaluated_again(house: House) -> None:
    house.submit("job-1", model="sandbox", name="my-model")
    house.complete("job-1")
    house.register("job-1", "my-model")
    assert house.tick(evaluate_completed_jobs) == []


def test_a_failed_or_cancelled_job_is_not_evaluated(house: House) -> None:
    house.submit("job-1")
    house.plane.jobs.fail("job-1", "reason")
    house.submit("job-2")
    house.plane.jobs.cancel("job-2")
    assert house.tick(evaluate_completed_jobs) == []


# A promoted version is deployed.


@pytest.mark.requirement("P5")
def test_a_promotion_to_production_is_deployed_once(house: House) -> None:
    house.register("run-1")
    seq = house.promote(1)
    (request,) = house.tick(deploy_promotions)
    assert keys(request) == [f"models/{MODEL}/deployment"]
    assert (request.run_key, request.partition_key) == (f"deploy-{seq}", "run-1")
    (event,) = house.asset_events
    assert event.asset_key.path == ["models", MODEL, "promotion"] and event.partition == "run-1"
    assert house.tick(deploy_promotions) == []


def test_promotion_to_another_stage_deploys_nothing(house: House) -> None:
    house.register("run-1")
    house.promote(1, stage="archived")
    assert house.tick(deploy_promotions) == []


def test_client_version_in_production_is_not_deployed_and_does_not_block_others(house: House) -> None:
    RegisteredModels(house.plane.database).create(model_key(MODEL))
    house.plane.registry.create(model_key(MODEL), ClientVersion(source="runs:/elsewhere/model", created_by="ann"))
    house.promote(1)
    house.register("run-1")
    seq = house.promote(2)
    assert [request.run_key for request in house.tick(deploy_promotions)] == [f"deploy-{seq}"]


def test_promotion_of_a_deleted_version_is_skipped(house: House) -> None:
    for run in ("run-1", "run-2"):
        house.register(run)
    house.promote(1)
    seq = house.promote(2)
    ModelVersionEdits(house.plane.database).delete(model_key(MODEL), 1)
    assert [request.run_key for request in house.tick(deploy_promotions)] == [f"deploy-{seq}"]


def test_undeployed_version_is_withdrawn_when_the_engine_is_reachable(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("HANZO_ML_ENGINE_PORT", str(port))
    house.plane.database.close()
    house.plane = ControlPlane()  # settings are read once
    house.register("run-1")
    seq = house.promote(1)
    house.begin_deployment(1, seq, "serving")
    undeploy(house.plane.database, model_key(MODEL), user="ann")

    def status() -> str:
        with house.plane.database.read() as connection:
            found = deployments.find_by_promotion(connection, seq)
        assert found is not None
        return found.status

    house.tick(withdraw_deployments)
    assert status() == "withdrawing", "an engine that is away would serve it again as it comes back"
    gateway = Gateway(house.folder / "engine", port)
    try:
        house.tick(withdraw_deployments)
    finally:
        gateway.kill()
    assert status() == "withdrawn"
    ModelVersionEdits(house.plane.database).delete(model_key(MODEL), 1)


@pytest.mark.parametrize("status", ["serving", "failed"])
def test_reset_cursor_does_not_redeploy(house: House, status: str) -> None:
    house.register("run-1")
    seq = house.promote(1)
    house.tick(deploy_promotions)
    house.begin_deployment(1, seq, status)
    house.reset()
    assert house.tick(deploy_promotions) == []


def test_interrupted_deployment_is_requested_again_under_the_same_run_key(house: House) -> None:
    house.register("run-1")
    seq = house.promote(1)
    (first,) = house.tick(deploy_promotions)
    house.begin_deployment(1, seq, "deploying")
    house.reset()
    (again,) = house.tick(deploy_promotions)
    assert again.run_key == first.run_key


def test_only_the_latest_of_two_promotions_is_deployed(house: House) -> None:
    for run in ("run-1", "run-2"):
        house.register(run)
    house.promote(1)
    second = house.promote(2)
    assert [request.run_key for request in house.tick(deploy_promotions)] == [f"deploy-{second}"]


def test_rollback_to_an_earlier_version_is_a_new_deployment(house: House) -> None:
    for run in ("run-1", "run-2"):
        house.register(run)
    for number in (1, 2):
        house.begin_deployment(number, house.promote(number), "serving")
    back = house.promote(1)
    assert [request.run_key for request in house.tick(deploy_promotions)] == [f"deploy-{back}"]


# A run that failed for good marks its job as failed.


@pytest.mark.parametrize(("steps", "status"), [(("checkpoint",), "failed"), (("merged", "gguf"), "completed")])
def test_permanently_failed_run_is_reported_once(house: House, steps: tuple[str, ...], status: str) -> None:
    house.submit("job-1")
    house.plane.jobs.start("job-1") if status == "failed" else house.complete("job-1")
    run = house.instance.get_run_by_id(failed_run(house, steps, "job-1"))
    assert run is not None
    for _ in range(2):
        assert not is_retried(house.instance, run, house.plane)
    job = house.plane.jobs.read("job-1")
    assert job.status == status
    assert run.run_id in job.reason
    with house.plane.database.read() as connection:
        told = read_after(connection, 0, types=["job.failed", "evaluation.failed"])
    assert [event.payload["error"] for event in told] == [job.reason]


@pytest.mark.parametrize("failed", ["older", "newer"])
def test_failed_run_does_not_fail_a_job_that_another_run_serves(house: House, failed: str) -> None:
    house.submit("job-1")
    house.plane.jobs.start("job-1")
    other = dg.DagsterRunStatus.STARTED if failed == "newer" else dg.DagsterRunStatus.FAILURE
    runs = [failed_run(house, ("checkpoint",), "job-1", status) for status in (other, dg.DagsterRunStatus.FAILURE)]
    run = house.instance.get_run_by_id(runs[failed == "newer"])
    assert run is not None
    assert not is_retried(house.instance, run, house.plane)
    assert house.plane.jobs.read("job-1").status == "running"


def test_failed_run_of_a_missing_job_does_not_block_others(house: House) -> None:
    for job in ("job-1", "job-2"):
        house.submit(job)
        house.plane.jobs.start(job)
        failed_run(house, ("checkpoint",), job)
        failed_run(house, ("checkpoint",), f"gone-{job}")
    assert house.tick(retry_dead_runs) == []
    assert [house.plane.jobs.read(job).status for job in ("job-1", "job-2")] == ["failed", "failed"]


# A cancelled job is stopped.


def test_cancelled_job_without_run_is_skipped(house: House) -> None:
    house.submit("job-1")
    house.plane.jobs.cancel("job-1")
    assert house.tick(stop_cancelled_jobs) == []
    assert not str(house.cursors["stop_cancelled_jobs"]).startswith("0")


# All of them.


@pytest.mark.parametrize("cursor", [None, "", "0", "not a number"])
def test_missing_or_invalid_cursor_starts_at_the_first_event(house: House, cursor: str | None) -> None:
    house.dataset(split=False)
    house.cursors = {split_new_versions.name: cursor}
    assert len(house.tick(split_new_versions)) == 1


def test_job_whose_model_was_renamed_is_not_evaluated_again(house: House) -> None:
    house.submit("job-1")
    house.complete("job-1")
    house.register("job-1")
    RegisteredModels(house.plane.database).rename(model_key(MODEL), "another")
    assert house.tick(evaluate_completed_jobs) == []


def test_cursor_never_moves_backwards_without_new_events(house: House) -> None:
    sensors = (split_new_versions, evaluate_completed_jobs, deploy_promotions, stop_cancelled_jobs)
    with house.plane.database.write() as connection:
        newest = emit(connection, "models", "model.updated", "m", {})
    house.cursors = {sensor.name: str(newest) for sensor in sensors}
    for _ in range(2):
        for sensor in sensors:
            assert house.tick(sensor) == []
            assert str(house.cursors[sensor.name]).split("/")[0] == str(newest)


@pytest.mark.requirement("Y5", "Y7")
@pytest.mark.slow
def test_recovery_events_and_stalls_of_a_running_job_are_reported_once(house: House) -> None:
    """A recovery, then a stall: one event and tag each, over any ticks."""
    house.submit("run-1")
    house.plane.jobs.start("run-1")
    assert house.tick(watch_training) == []  # it has no record yet: nothing to check
    recipe = Recipe.named("smollm2-135m-lora")
    environment = Environment(git_commit="none", git_dirty=False, lock_sha256="none", python="3.11")
    record = RunRecord(run_id="run-1", model=MODEL, dataset="d@1", recipe=recipe, seed=1, environment=environment)
    write_record(house.plane.store, record, {})
    incident = OutOfMemory(step=5, batch_size=2, gradient_accumulation=2)
    add_recovery_event(house.plane.store, "s3://hanzo-ml/checkpoints/run-1", incident)
    house.plane.store.put_bytes("s3://hanzo-ml/checkpoints/run-1/4/manifest.json", b"{}")
    job, now = house.plane.jobs.read("run-1"), now_ms()
    data = RunData(house.plane.database)
    data.log_batch("run-1", metrics=[MetricPoint("train/loss", 2.0, 1, now)])
    for minutes in (1, 10, 20, 20, 30, 600, 700):
        check_training(job, house.plane, now + minutes * 60_000)
    house.tick(watch_training)
    with house.plane.database.read() as connection:
        told = [event for event in read_after(connection, 0) if event.type.startswith("job.") and event.key == "run-1"][2:]
    assert [event.type for event in told] == ["job.out_of_memory", "job.stalled", "job.checkpoint_stale"]
    assert told[0].payload["batch_size"] == 2
    assert set(data.tags("run-1")) >= {"health/incident_1", "health/stalled", "health/checkpoint_stale"}
    data.log_batch("run-1", metrics=[MetricPoint("train/loss", 1.9, 2, now + 701 * 60_000)])
    check_training(job, house.plane, now + 720 * 60_000)  # it continued, and stalls a second time
    with house.plane.database.read() as connection:
        assert [event.type for event in read_after(connection, told[-1].seq, ["job.stalled"])] == ["job.stalled"]


def test_a_job_that_waits_for_gpus_is_not_stalled(house: House) -> None:
    """It was reported as stalled and its checkpoints as late while it waited."""
    house.submit("run-1")
    house.plane.jobs.start("run-1")
    environment = Environment(git_commit="none", git_dirty=False, lock_sha256="none", python="3.11")
    recipe = Recipe.named("smollm2-135m-lora")
    record = RunRecord(run_id="run-1", model=MODEL, dataset="d@1", recipe=recipe, seed=1, environment=environment)
    write_record(house.plane.store, record, {})
    job, now = house.plane.jobs.read("run-1"), now_ms()
    logged = MetricPoint("train/loss", 2.0, 1, now - 600 * 60_000)
    RunData(house.plane.database).log_batch("run-1", metrics=[logged])
    waits = house.plane.settings.home / "jobs" / "run-1" / "train" / QUEUED_START_FILE
    waits.parent.mkdir(parents=True)
    waits.touch()
    with house.plane.database.write() as connection:
        connection.execute(update(events).values(created_at=now - 700 * 60_000))

    def told() -> list[str]:
        check_training(job, house.plane, now_ms())
        with house.plane.database.read() as connection:
            return [event.type for event in read_after(connection, 0, ["job.stalled", "job.checkpoint_stale"])]

    assert told() == []
    waits.rename(waits.with_name(QUEUED_UNTIL_FILE))
    os.utime(waits.with_name(QUEUED_UNTIL_FILE))
    assert told() == [], "it has just got them"
    os.utime(waits.with_name(QUEUED_UNTIL_FILE), times=(0, now / 1000 - 20 * 60))
    assert told() == ["job.stalled"]


@pytest.mark.parametrize("spoilt", ["record", "checkpoint", "incidents"])
def test_unreadable_training_record_does_not_block_watching_other_jobs(
    house: House, monkeypatch: pytest.MonkeyPatch, spoilt: str
) -> None:
    """One such job blocked all others.

    The record is of another release, or retention removed a checkpoint that was just listed.
    """
    store, recipe = house.plane.store, Recipe.named("smollm2-135m-lora")
    environment = Environment(git_commit="none", git_dirty=False, lock_sha256="none", python="3.11")
    for id in ("run-1", "run-2"):
        house.submit(id)
        house.plane.jobs.start(id)
        record = RunRecord(run_id=id, model=MODEL, dataset="d@1", recipe=recipe, seed=1, environment=environment)
        write_record(store, record, {})
        add_recovery_event(
            store, f"s3://hanzo-ml/checkpoints/{id}", OutOfMemory(step=5, batch_size=2, gradient_accumulation=2)
        )
    if spoilt == "record":
        (house.folder / "record").mkdir()
        (house.folder / "record" / RECORD_FILE).write_text('{"run_id": "run-1"}')
        store.publish(house.folder / "record", "s3://hanzo-ml/runs/run-1/record", "run")
    elif spoilt == "incidents":
        store.put_bytes("s3://hanzo-ml/checkpoints/run-1/incidents.json", b'{"entries": [{"kind": "of another release"}]}')
    else:
        listed = Store.list

        def pruned(self: Store, uri: str) -> list[str]:
            found = listed(self, uri)
            return [*found, f"{uri}/4/manifest.json"] if uri.endswith("run-1") else found

        monkeypatch.setattr(Store, "list", pruned)
    house.tick(watch_training)
    with house.plane.database.read() as connection:
        told = [event.key for event in read_after(connection, 0, ["job.out_of_memory"])]
    assert told == (["run-1", "run-2"] if spoilt == "checkpoint" else ["run-2"])


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
    house: House, policy: dict[str, Any], schedule: dict[str, Any], minutes: int
) -> None:
    """After 90 minutes of an hour's interval, or half an hour for preemptible nodes.

    A checkpoint without a manifest does not count.
    """
    recipe = Recipe.named("smollm2-135m-lora").changed({"checkpoint": policy})
    environment = Environment(git_commit="none", git_dirty=False, lock_sha256="none", python="3.11")
    house.submit("run-1", schedule=schedule)
    house.plane.jobs.start("run-1")
    record = RunRecord(run_id="run-1", model=MODEL, dataset="d@1", recipe=recipe, seed=1, environment=environment)
    write_record(house.plane.store, record, {})
    data, job, now = RunData(house.plane.database), house.plane.jobs.read("run-1"), now_ms()
    late = ["job.checkpoint_stale"]

    def told(after: int) -> list[str]:
        data.log_batch("run-1", metrics=[MetricPoint("train/loss", 2.0, after, now + after * 60_000)])  # avoids a stall
        check_training(job, house.plane, now + after * 60_000)
        with house.plane.database.read() as connection:
            return [event.type for event in read_after(connection, 0, late)]

    def arrive(name: str) -> None:
        uri = f"s3://hanzo-ml/checkpoints/run-1/4/{name}"
        house.plane.store.put_bytes(uri, b"{}")
        path = house.plane.store.local_path(uri)
        assert path is not None
        os.utime(path, (now / 1000 + minutes * 60,) * 2)

    told(0)
    assert told(minutes - 1) == []
    arrive("model.safetensors")
    assert told(minutes + 1) == late
    arrive("manifest.json")
    assert told(minutes + 2) == told(2 * minutes - 1) == late
    assert told(2 * minutes + 1) == late * 2


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
    house: House, monkeypatch: pytest.MonkeyPatch, status: str, before: int, pause: int, tried: int
) -> None:
    """The store failed during the download, or the database before or after the engine's swap."""
    house.submit("job-1")
    promotion = house.promote(house.register("job-1").version)
    if status:
        house.begin_deployment(1, promotion, status)
    monkeypatch.setattr(dead_runs, "DEPLOYMENT_RETRY_PAUSE", timedelta(minutes=pause))
    run = failed_run(house, ("deployment",), "job-1", **{RETRIES_TAG: str(before)})
    requests = house.tick(retry_dead_runs)
    assert [(request.partition_key, request.tags[RETRIED_RUN_TAG]) for request in requests] == [("job-1", run)] * tried


def test_training_launched_in_dagster_is_listed_as_queued_and_starts_once(house: House) -> None:
    """It became a job only when its run had begun, hours later."""
    house.dataset()
    click(house, "clicked", {"parameters": {"max_steps": 3}})
    click(house, "job-1", {})
    house.submit("job-1")
    house.tick(list_clicked_runs)
    house.tick(list_clicked_runs)
    job = house.plane.jobs.read("clicked")
    assert (job.status, job.user_id) == ("queued", "dagster")
    assert job.config == {"name": MODEL, "model": MODEL, "parameters": {"max_steps": 3}}
    assert house.plane.jobs.read("job-1").user_id == "u", "that is recorded already"
    assert [request.run_key for request in house.tick(start_submitted_jobs)] == ["job-1"], "the other has its run"
    assert house.plane.jobs.read("clicked").reason == "waits for its turn in Dagster's queue"
    ensure_job("clicked", MODEL, {"parameters": {"max_steps": 3}}, house.plane)
    assert house.plane.jobs.start("clicked").status == "running"


def test_training_fails_when_its_queued_run_is_deleted_in_dagster(house: House) -> None:
    run = click(house, "clicked", {})
    house.tick(list_clicked_runs)
    house.instance.delete_run(run.run_id)
    assert house.tick(start_submitted_jobs) == []
    job = house.plane.jobs.read("clicked")
    assert job.status == "failed" and "its run was deleted in Dagster" in job.reason


def test_training_is_cancelled_when_its_queued_run_is_terminated_in_dagster(house: House) -> None:
    run = click(house, "clicked", {})
    house.tick(list_clicked_runs)
    house.instance.report_run_canceled(run)
    assert house.tick(start_submitted_jobs) == []
    house.tick(cancel_terminated_jobs)
    assert house.plane.jobs.read("clicked").status == "cancelled"


def click(house: House, partition: str, given: dict[str, Any]) -> dg.DagsterRun:
    """Create a queued run of the training, as the launchpad does."""
    key = dg.AssetKey(["models", MODEL, "checkpoint"])
    definition = house.repository.get_implicit_job_def_for_assets([key])
    assert definition is not None
    return house.instance.create_run_for_job(
        definition,
        run_config={"ops": {key.to_python_identifier(): {"config": given}}} if given else {},
        asset_selection=frozenset({key}),
        tags={PARTITION_TAG: partition},
        status=dg.DagsterRunStatus.QUEUED,
        remote_job_origin=RemoteJobOrigin(RemoteRepositoryOrigin(RegisteredCodeLocationOrigin("here"), "all"), "job"),
    )
