"""Usage of failed and cancelled jobs is recorded once, on run and experiment."""

from typing import Any

import dagster as dg
import pytest

from hanzo_ml_assets.dry_run import training as dry_run
from hanzo_ml_assets.training_plan import make_training_plan
from recipes.contracts.command_job import CommandJob
from recipes.contracts.job import Machine
from recipes.contracts.recovery_log import OutOfMemory, add_recovery_event
from recipes.contracts.results import Usage, write_usage
from resources.jobs.command import submit_command
from resources.metadata.outbox import read_after
from resources.metadata.tracking.metrics import Metrics
from resources.metadata.tracking.run_data import RunData
from resources.metadata.tracking.runs import Runs
from sensors.account_ended_jobs import account_ended_jobs
from tests.support.sensors.sensor_harness import MODEL, SensorHarness, harness, repository

__all__ = ["harness", "repository"]  # fixtures

MACHINE = Machine(python="3.11.7", packages={"torch": "2.13.0"}, processor="EPYC", gpus=("A100",), threads=4)
GPUS: dict[str, Any] = {"gpus": 2, "gpu_type": "nvidia-a100-80gb"}
HALF_AN_HOUR = Usage(
    seconds=1800,
    gpus=2,
    gpu_seconds=3600,
    checkpoints=9,
    peak_memory=5_000_000_000,
    steps=7,
    tokens=448,
    machine=MACHINE,
)
HEALED = OutOfMemory(step=7, batch_size=2, gradient_accumulation=2)
USAGE_METRICS = {
    "system/gpu_count": 2.0,
    "system/total_gpu_hours": 1.0,
    "system/dollars": 3.0,
    "system/total_steps": 7.0,
    "system/total_tokens_processed": 448.0,
    "system/peak_memory_gb": 5.0,
    "system/checkpoint_share": 0.005,
}


def training(harness: SensorHarness, id: str, usage: Usage) -> str:
    """Create a training job with this usage so far."""
    harness.submit(id, parameters={"hardware": GPUS, "distributed": {"gpus_per_node": 2}})
    harness.plane.jobs.start(id)
    make_training_plan(dry_run.load_definition(MODEL), id, harness.plane)
    write_usage(harness.plane.store, f"s3://hanzo-ml/runs/{id}", usage)
    return id


def said(harness: SensorHarness, run: str) -> dict[str, float]:
    """Return the logged values by metric; fail where one was logged twice."""
    history = Metrics(harness.plane.database).history
    points = [point for key in USAGE_METRICS for point in history(run, key, 10).points]
    found = {point.key: point.value for point in points}
    assert len(found) == len(points)
    return found


def end(harness: SensorHarness, id: str, status: str) -> None:
    if status == "cancelled":
        harness.plane.jobs.cancel(id)
    else:
        harness.plane.jobs.fail(id, "its run failed")


@pytest.mark.parametrize("status", ["failed", "cancelled"])
def test_usage_of_an_ended_job_is_recorded_once_after_its_last_run_ended(harness: SensorHarness, status: str) -> None:
    harness.dataset()
    job = training(harness, "ended", HALF_AN_HOUR.model_copy(update={"seconds": 60.0}))
    definition = harness.repository.get_implicit_job_def_for_assets([dg.AssetKey(["models", MODEL, "checkpoint"])])
    assert definition is not None
    run = harness.instance.create_run_for_job(
        definition, tags={"dagster/partition": job}, status=dg.DagsterRunStatus.STARTED
    )
    end(harness, job, status)
    harness.tick(account_ended_jobs)
    assert said(harness, job) == {}, "its program may still write more"
    write_usage(harness.plane.store, f"s3://hanzo-ml/runs/{job}", HALF_AN_HOUR)
    add_recovery_event(harness.plane.store, f"s3://hanzo-ml/checkpoints/{job}", HEALED)
    harness.instance.report_run_canceled(run)
    for _ in range(2):
        harness.reset()
        harness.tick(account_ended_jobs)
        assert said(harness, job) == USAGE_METRICS
    tags = RunData(harness.plane.database).tags(job)
    assert tags["health/incident_1"] == HEALED.message, "since somebody looked at it last"
    with harness.plane.database.read() as connection:
        assert [event.key for event in read_after(connection, 0, ["job.out_of_memory"])] == [job]
    assert {key: tags[key] for key in ("environment/gpus", "environment/torch")} == {
        "environment/gpus": "A100",
        "environment/torch": "2.13.0",
    }


def test_usage_of_an_unused_or_resumed_job_is_not_recorded(harness: SensorHarness) -> None:
    harness.dataset()
    unused, resumed = training(harness, "unused", Usage()), training(harness, "resumed", HALF_AN_HOUR)
    for job in (unused, resumed):
        end(harness, job, "failed")
    harness.plane.jobs.start(resumed)
    harness.tick(account_ended_jobs)
    assert said(harness, unused) == said(harness, resumed) == {}
    end(harness, resumed, "failed")
    harness.tick(account_ended_jobs)
    assert said(harness, resumed) == USAGE_METRICS


def test_job_with_a_deleted_run_does_not_block_others(harness: SensorHarness) -> None:
    harness.dataset()
    first, second = training(harness, "first", HALF_AN_HOUR), training(harness, "second", HALF_AN_HOUR)
    for job in (first, second):
        end(harness, job, "cancelled")
    Runs(harness.plane.database).delete(first)
    harness.tick(account_ended_jobs)
    assert (said(harness, first), said(harness, second)) == ({}, USAGE_METRICS)


def test_command_job_records_only_its_gpu_usage(harness: SensorHarness) -> None:
    asked = CommandJob.model_validate({"name": "mine", "command": ["python", "train.py"], "resources": GPUS})
    job = submit_command(harness.plane.database, harness.plane.store, asked, "ann", "default").id
    write_usage(harness.plane.store, f"s3://hanzo-ml/runs/{job}", Usage(seconds=1800, gpus=2, gpu_seconds=3600))
    end(harness, job, "failed")
    harness.tick(account_ended_jobs)
    assert said(harness, job) == {
        key: USAGE_METRICS[key] for key in ("system/gpu_count", "system/total_gpu_hours", "system/dollars")
    }


@pytest.mark.parametrize("spoilt", ["record/run.json", "record/manifest.json", "usage.json", "incidents.json"])
def test_unreadable_usage_file_of_one_job_does_not_block_others(harness: SensorHarness, spoilt: str) -> None:
    """A corrupt or older usage file stopped the sensor for good."""
    harness.dataset()
    first, second = (training(harness, id, HALF_AN_HOUR) for id in ("a", "b"))
    folder = "checkpoints" if spoilt == "incidents.json" else "runs"
    harness.plane.store.put_bytes(f"s3://hanzo-ml/{folder}/{first}/{spoilt}", b'{"of": "another release"}')
    for id in (first, second):
        end(harness, id, "failed")
    harness.tick(account_ended_jobs)
    assert (said(harness, first), said(harness, second)) == ({}, USAGE_METRICS)
