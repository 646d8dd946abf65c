"""Dagster on a real cluster: jobs wait without run pods, and no job is lost or doubled with the pod that supervises it."""

import os
import time
from collections.abc import Iterator

import dagster as dg
import psutil
import pytest
from dagster._core.events import JobFailureData, RunFailureReason

from resources.compute.base import Phase
from resources.metadata.job_record import JobRecord
from tests.cluster.cluster import Cluster
from tests.cluster.dagster_installation import DagsterInstallation
from tests.cluster.installation import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.cluster_slow]
QUOTA = 8
REPLACED_WITHIN = 120.0
MEMORY_BYTES = 250_000_000
OUTAGE_SECONDS = 25
"""Dagster's run monitor checks a run every 10 s."""


@pytest.fixture(scope="module")
def house(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DagsterInstallation]:
    installation = DagsterInstallation(cluster, "dagster-runs", tmp_path_factory.mktemp("home"), gpus=QUOTA)
    with pytest.MonkeyPatch.context() as environment:
        for name in [name for name in os.environ if name.startswith("HANZO_ML_")]:
            environment.delenv(name)
        for name, value in installation.environment.items():
            environment.setenv(name, value)
        with installation:
            yield installation


def started(house: DagsterInstallation, name: str, seconds: int) -> tuple[JobRecord, dg.DagsterRun]:
    """A job that runs, and its run."""
    job = house.submit_loop(name, seconds, gpus=QUOTA)
    run = house.wait_for_run(job)
    house.wait_for(job, Phase.RUNNING)
    return job, run


def end(house: DagsterInstallation, job: JobRecord) -> None:
    """Cancel a job, and wait until its pods and its run are gone."""
    house.records.cancel(job.id)
    house.wait_for(job, Phase.FAILED)
    wait_until(lambda: not house.gang_pods(job), 60, lambda: house.describe_runs(job))


def test_queued_job_waits_without_a_run_pod_and_starts_at_admission(house: DagsterInstallation) -> None:
    first, _ = started(house, "first", 600)
    second = house.submit_loop("second", 5, gpus=QUOTA)
    wait_until(lambda: "more needed" in house.read(second).reason, 60, lambda: house.describe_runs(second))
    assert house.read(second).status == "queued"
    assert house.runs(second) == [] and len(house.run_pods()) == 1
    end(house, first)
    assert [run.status for run in house.runs(first)] == [dg.DagsterRunStatus.CANCELED]
    house.wait_for_status(second, "completed")
    (event,) = house.events(second, "job.started")
    assert event.payload["node_ids"][0] in house.cluster.nodes


def test_run_worker_stays_within_its_memory_limit(house: DagsterInstallation) -> None:
    job, run = started(house, "memory", 600)
    processes = [process.info for process in psutil.process_iter(["cmdline", "memory_info"])]
    workers = [info for info in processes if run.run_id in " ".join(info["cmdline"] or ())]
    assert 0 < max(info["memory_info"].rss for info in workers) < MEMORY_BYTES
    end(house, job)


@pytest.mark.parametrize("grace", ["--grace-period=15", "--grace-period=0"], ids=["evicted", "killed"])
def test_lost_run_pod_is_replaced_and_its_gang_never_notices(house: DagsterInstallation, grace: str) -> None:
    job, run = started(house, "lost", 40)
    (gang,) = house.gang_pods(job)
    (pod,) = house.run_pods(run)
    force = ["--force"] if grace.endswith("=0") else []
    name = pod["metadata"]["name"]
    house.cluster.kubectl("delete", "pod", name, f"--namespace={house.name}", grace, "--wait=false", *force)
    house.wait_for_run(job, after=run, within=REPLACED_WITHIN)
    house.wait_for_status(job, "completed")
    (attempt,) = house.attempts.list(job)
    assert attempt.claimed_by == gang["metadata"]["uid"]
    assert len(house.runs(job)) == 2


def test_worker_that_starts_after_its_run_was_failed_leaves_the_job_to_its_successor(house: DagsterInstallation) -> None:
    """Dagster fails a run that takes too long to start, and its pod, which waited for a node or an image, starts later."""
    job, run = started(house, "late", 600)
    (gang,) = house.gang_pods(job)
    (pod,) = house.run_pods(run)
    nodes = list(house.cluster.nodes)
    house.cluster.kubectl("cordon", *nodes)
    try:
        delete_at_once(house, pod["metadata"]["name"])
        wait_until(lambda: len(house.runs(job, dg.DagsterRunStatus.STARTING)) == 1, 120, lambda: house.describe_runs(job))
        (late,) = house.runs(job, dg.DagsterRunStatus.STARTING)
        wait_until(lambda: len(house.run_pods(late)) == 1, 60, lambda: house.describe_runs(job))
        timed_out = JobFailureData(error=None, failure_reason=RunFailureReason.START_TIMEOUT)
        house.instance.report_run_failed(late, "It took too long to start.", timed_out)
        wait_until(lambda: len(house.runs(job)) == 3, 60, lambda: house.describe_runs(job))
    finally:
        house.cluster.kubectl("uncordon", *nodes)
    successor = house.wait_for_run(job, after=run)
    wait_until(lambda: not house.run_pods(late), REPLACED_WITHIN, lambda: house.describe_runs(job))
    assert [run.run_id for run in house.runs(job, dg.DagsterRunStatus.STARTED)] == [successor.run_id]
    assert successor.run_id != late.run_id
    (attempt,) = house.attempts.list(job)
    assert attempt.claimed_by == gang["metadata"]["uid"]
    end(house, job)


def delete_at_once(house: DagsterInstallation, pod: str) -> None:
    house.cluster.kubectl("delete", "pod", pod, f"--namespace={house.name}", "--grace-period=0", "--force")


def test_run_terminated_in_dagster_cancels_its_job_and_its_gang(house: DagsterInstallation) -> None:
    job, run = started(house, "terminated", 600)
    house.instance.run_coordinator.cancel_run(run.run_id)
    house.wait_for(job, Phase.FAILED)
    house.wait_for_status(job, "cancelled")
    wait_until(lambda: not house.gang_pods(job) and not house.run_pods(run), 60, lambda: house.describe_runs(job))


@pytest.mark.cluster_slow
def test_run_pod_on_a_lost_node_is_replaced_within_two_minutes(house: DagsterInstallation) -> None:
    job, run = started(house, "node-lost", 300)
    (gang,) = house.gang_pods(job)
    (pod,) = house.run_pods(run)
    if pod["spec"]["nodeName"] == gang["spec"]["nodeName"]:  # the test is about the supervisor alone
        house.cluster.kubectl("cordon", gang["spec"]["nodeName"])
        house.cluster.kubectl("delete", "pod", pod["metadata"]["name"], f"--namespace={house.name}")
        run = house.wait_for_run(job, after=run)
        house.cluster.kubectl("uncordon", gang["spec"]["nodeName"])
        (pod,) = house.run_pods(run)
    node = pod["spec"]["nodeName"]
    house.cluster.kill_node(node)
    try:
        replaced = house.wait_for_run(job, after=run, within=REPLACED_WITHIN)
        assert [pod["metadata"]["labels"]["dagster/run-id"] for pod in house.run_pods()] == [replaced.run_id]
    finally:
        house.cluster.add_node(int(node.removeprefix("node-")))
    (attempt,) = house.attempts.list(job)
    assert attempt.claimed_by == gang["metadata"]["uid"]
    end(house, job)


@pytest.mark.cluster_slow
def test_outage_of_the_api_server_fails_no_run(house: DagsterInstallation) -> None:
    job, run = started(house, "outage", 600)
    house.cluster.control_plane.kill("apiserver")
    try:
        waiting = house.submit_loop("submitted-meanwhile", 5)
        time.sleep(OUTAGE_SECONDS)
        assert house.runs(job)[0].status == dg.DagsterRunStatus.STARTED
    finally:
        house.cluster.control_plane.start("apiserver")
    house.wait_for_status(waiting, "completed")
    assert [each.run_id for each in house.runs(job, dg.DagsterRunStatus.STARTED)] == [run.run_id]
    end(house, job)
