"""A Dagster that lost its history, with a database that did not.

This happened whenever the pod with Dagster's history died.
"""

import dagster as dg
import pytest
from dagster._core.definitions.partitions.context import partition_loading_context

from hanzo_ml_assets.command import COMMAND_KEY as COMMANDS
from hanzo_ml_assets.preparation import PREPARATION_TAG
from resources.metadata.jobs import COMMAND, PREPARATION
from sensors.decisions.job_runs import RUN_KEY_TAG
from sensors.deploy_promotions import deploy_promotions
from sensors.evaluate_completed_jobs import evaluate_completed_jobs
from sensors.recover_restored_jobs import go_on_with_put_back_jobs
from sensors.sensor import Sensor
from sensors.split_new_versions import split_new_versions
from sensors.start_submitted_jobs import start_submitted_jobs
from tests.support.sensors.interrupted_runs import run_of
from tests.support.sensors.sensor_harness import DATASET, MODEL, SensorHarness, harness, keys, repository

__all__ = ["harness", "repository"]  # fixtures
STARTED, FAILURE, CANCELED = dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED


def look(harness: SensorHarness, sensor: Sensor) -> list[dg.RunRequest]:
    """Return the requests of a first tick, checked as by Dagster's daemon.

    The tick fails for an unknown partition.
    """
    context = dg.build_sensor_context(instance=harness.instance, repository_def=harness.repository)
    with partition_loading_context(dynamic_partitions_store=harness.instance):
        return list(sensor.on(harness.plane).evaluate_tick(context).run_requests or [])


@pytest.mark.parametrize("type", ["training", COMMAND])
def test_running_job_without_known_run_gets_a_new_run(harness: SensorHarness, type: str) -> None:
    harness.plane.jobs.submit(name=MODEL, config={"model": MODEL}, user="u", organization="default", id="job-1", type=type)
    harness.plane.jobs.start("job-1")
    assert look(harness, start_submitted_jobs) == []
    (request,) = look(harness, go_on_with_put_back_jobs)
    assert (request.run_key, request.partition_key) == ("job-1", "job-1")
    assert keys(request) == ["/".join(COMMANDS) if type == COMMAND else f"models/{MODEL}/checkpoint"]


def test_running_preparation_without_known_run_gets_a_new_run(harness: SensorHarness) -> None:
    asked = harness.plane.jobs.submit(
        name="p", config={"dataset": f"{DATASET}@1"}, user="u", organization="default", type=PREPARATION
    )
    harness.plane.jobs.start(asked.id)
    (request,) = look(harness, go_on_with_put_back_jobs)
    assert (request.tags[PREPARATION_TAG], keys(request)) == (asked.id, [f"datasets/{DATASET}/prepared"])
    harness.instance.add_run(dg.DagsterRun(job_name="__ASSET_JOB", tags={PREPARATION_TAG: asked.id}))
    assert look(harness, go_on_with_put_back_jobs) == []


@pytest.mark.parametrize("status", [STARTED, FAILURE, CANCELED])
def test_job_with_a_known_run_gets_no_other(harness: SensorHarness, status: dg.DagsterRunStatus) -> None:
    harness.submit("job-1")
    harness.plane.jobs.start("job-1")
    run_of(harness, "job-1", status, **{RUN_KEY_TAG: "job-1"})
    assert look(harness, go_on_with_put_back_jobs) == []


def test_queued_job_is_started_only_by_its_own_sensor(harness: SensorHarness) -> None:
    harness.dataset()
    harness.submit("job-1")
    assert look(harness, go_on_with_put_back_jobs) == []
    assert [request.run_key for request in look(harness, start_submitted_jobs)] == ["job-1"]


def test_only_unfinished_work_is_requested_again(harness: SensorHarness) -> None:
    """A training without an exported version blocked all later ones: its partition was unknown."""
    harness.dataset()
    for job in ("job-1", "job-2"):
        harness.submit(job)
        harness.complete(job)
    harness.register("job-1")
    promotion = harness.promote(1)
    assert [request.run_key for request in look(harness, evaluate_completed_jobs)] == ["evaluate-job-2"]
    assert look(harness, split_new_versions) == []
    assert [request.run_key for request in look(harness, deploy_promotions)] == [f"deploy-{promotion}"]
    harness.begin_deployment(1, promotion, "serving")
    assert look(harness, deploy_promotions) == []
