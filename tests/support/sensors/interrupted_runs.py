"""Runs that were interrupted."""

import time

import dagster as dg

from tests.support.sensors.sensor_harness import MODEL, SensorHarness

FAILURE, CANCELED = dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED


def run_of(harness: SensorHarness, job: str, status: dg.DagsterRunStatus, step: str = "checkpoint", **tags: str) -> str:
    run = dg.DagsterRun(
        job_name="__ASSET_JOB",
        status=status,
        asset_selection=frozenset({dg.AssetKey(["models", MODEL, step])}),
        tags={"dagster/partition": job, **tags},
    )
    harness.instance.add_run(run)
    time.sleep(0.01)  # the next run is younger, also in milliseconds
    return str(run.run_id)
