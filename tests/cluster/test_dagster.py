"""Dagster on a real cluster: jobs survive the loss of their supervising pod.

They are neither lost nor duplicated, and wait without run pods. The whole chain, from records to a registered version, is
launched and cancelled by the requests that the UI makes.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import dagster as dg
import pytest
from dagster._core.events import JobFailureData, RunFailureReason

from recipes.contracts.exit_reason import ExitReason
from recipes.contracts.job import Program
from recipes.contracts.recipe import Recipe
from recipes.export.base_model import resolve_base_model
from recipes.storage.base_model_folder import hash_model_folder
from resources.compute.base import JobRef, Phase
from resources.ingest.version_creation import create_version
from resources.metadata.job_record import JobRecord
from resources.metadata.registry.version_lifecycle import Registry
from tests.cluster.cluster import Cluster
from tests.cluster.dagster_installation import SETTINGS_MAP, DagsterInstallation, kill_worker, measure_worker
from tests.cluster.installation import wait_until
from tests.cluster.job_controllers import move_controllers
from tests.cluster.trainings import GANG_RECIPE
from tests.recipes.tiny_model import make_tiny_model

pytestmark = [pytest.mark.cluster, pytest.mark.cluster_slow]
QUOTA = 8
REPLACED_WITHIN = 120.0
MEMORY_BYTES = 250_000_000
OUTAGE_SECONDS = 25
"""Dagster's run monitor checks a run every 10 s."""


@pytest.fixture(scope="module")
def installation(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DagsterInstallation]:
    installation = DagsterInstallation(cluster, "dagster-runs", tmp_path_factory.mktemp("home"), gpus=QUOTA)
    with pytest.MonkeyPatch.context() as environment:
        for name in [name for name in os.environ if name.startswith("HANZO_ML_")]:
            environment.delenv(name)
        for name, value in installation.environment.items():
            environment.setenv(name, value)
        with installation:
            yield installation


def started(installation: DagsterInstallation, name: str, seconds: int) -> tuple[JobRecord, dg.DagsterRun]:
    """Create a running job, and return it with its run."""
    job = installation.submit_loop(name, seconds, gpus=QUOTA)
    run = installation.wait_for_run(job)
    installation.wait_for(job, Phase.RUNNING)
    return job, run


def end(installation: DagsterInstallation, job: JobRecord) -> None:
    """Cancel a job, and wait until its pods and its run are gone."""
    installation.records.cancel(job.id)
    installation.wait_for(job, Phase.FAILED)
    wait_until(lambda: not installation.gang_pods(job), 60, lambda: installation.describe_runs(job))


def test_queued_job_waits_without_a_run_pod_and_starts_at_admission(installation: DagsterInstallation) -> None:
    first, _ = started(installation, "first", 600)
    second = installation.submit_loop("second", 5, gpus=QUOTA)
    wait_until(lambda: "more needed" in installation.read(second).reason, 60, lambda: installation.describe_runs(second))
    assert installation.read(second).status == "queued"
    assert installation.runs(second) == [] and len(installation.run_pods()) == 1
    end(installation, first)
    assert [run.status for run in installation.runs(first)] == [dg.DagsterRunStatus.CANCELED]
    installation.wait_for_status(second, "completed")
    (event,) = installation.events(second, "job.started")
    assert event.payload["node_ids"][0] in installation.cluster.nodes


def test_run_worker_stays_within_its_memory_limit(installation: DagsterInstallation) -> None:
    job, run = started(installation, "memory", 600)
    assert 0 < measure_worker(run.run_id) < MEMORY_BYTES
    end(installation, job)


@pytest.mark.parametrize("grace", ["--grace-period=15", "--grace-period=0"], ids=["evicted", "killed"])
def test_lost_run_pod_is_replaced_without_a_restart_of_its_gang(installation: DagsterInstallation, grace: str) -> None:
    job, run = started(installation, "lost", 40)
    (gang,) = installation.gang_pods(job)
    (pod,) = installation.run_pods(run)
    force = ["--force"] if grace.endswith("=0") else []
    name = pod["metadata"]["name"]
    installation.cluster.kubectl("delete", "pod", name, f"--namespace={installation.name}", grace, "--wait=false", *force)
    installation.wait_for_run(job, after=run, within=REPLACED_WITHIN)
    installation.wait_for_status(job, "completed")
    (attempt,) = installation.attempts.list(job)
    assert attempt.claimed_by == gang["metadata"]["uid"]
    assert len(installation.runs(job)) == 2


def test_worker_that_starts_after_its_run_was_failed_leaves_the_job_to_its_successor(
    installation: DagsterInstallation,
) -> None:
    """Dagster fails a run that takes too long to start.

    Its pod, which waited for a node or an image, starts later.
    """
    job, run = started(installation, "late", 600)
    (gang,) = installation.gang_pods(job)
    (pod,) = installation.run_pods(run)
    nodes = list(installation.cluster.nodes)
    installation.cluster.kubectl("cordon", *nodes)
    try:
        delete_at_once(installation, pod["metadata"]["name"])
        wait_until(
            lambda: len(installation.runs(job, dg.DagsterRunStatus.STARTING)) == 1,
            120,
            lambda: installation.describe_runs(job),
        )
        (late,) = installation.runs(job, dg.DagsterRunStatus.STARTING)
        wait_until(lambda: len(installation.run_pods(late)) == 1, 60, lambda: installation.describe_runs(job))
        timed_out = JobFailureData(error=None, failure_reason=RunFailureReason.START_TIMEOUT)
        installation.instance.report_run_failed(late, "It took too long to start.", timed_out)
        wait_until(lambda: len(installation.runs(job)) == 3, 60, lambda: installation.describe_runs(job))
    finally:
        installation.cluster.kubectl("uncordon", *nodes)
    successor = installation.wait_for_run(job, after=run)
    wait_until(lambda: not installation.run_pods(late), REPLACED_WITHIN, lambda: installation.describe_runs(job))
    assert [run.run_id for run in installation.runs(job, dg.DagsterRunStatus.STARTED)] == [successor.run_id]
    assert successor.run_id != late.run_id
    (attempt,) = installation.attempts.list(job)
    assert attempt.claimed_by == gang["metadata"]["uid"]
    end(installation, job)


def delete_at_once(installation: DagsterInstallation, pod: str) -> None:
    installation.cluster.kubectl("delete", "pod", pod, f"--namespace={installation.name}", "--grace-period=0", "--force")


def test_run_terminated_in_dagster_cancels_its_job_and_its_gang(installation: DagsterInstallation) -> None:
    job, run = started(installation, "terminated", 600)
    installation.instance.run_coordinator.cancel_run(run.run_id)
    installation.wait_for(job, Phase.FAILED)
    installation.wait_for_status(job, "cancelled")
    wait_until(
        lambda: not installation.gang_pods(job) and not installation.run_pods(run),
        60,
        lambda: installation.describe_runs(job),
    )


def test_run_pod_that_starts_after_its_run_was_abandoned_supervises_no_job(installation: DagsterInstallation) -> None:
    """A missing ConfigMap delays its pod until Dagster's run monitor gives the run up."""
    installation.cluster.kubectl("delete", "configmap", SETTINGS_MAP, f"--namespace={installation.name}")
    job = installation.submit_loop("late", 30)
    wait_until(lambda: bool(installation.run_pods()), 120, lambda: installation.describe_runs(job))
    (late,) = installation.runs(job)
    (pod,) = installation.run_pods(late)
    given_up = JobFailureData(error=None, failure_reason=RunFailureReason.START_TIMEOUT)
    installation.instance.report_run_failed(late, "it took too long to start", given_up)
    installation.apply_settings()
    installation.wait_for_status(job, "completed")
    supervisors = [run for run in installation.runs(job) if "STEP_START" in installation.event_types(run)]
    assert len(supervisors) == 1 and supervisors[0].run_id != late.run_id
    (attempt,) = installation.attempts.list(job)
    assert attempt.reason is ExitReason.COMPLETED
    name = pod["metadata"]["name"]
    wait_until(lambda: name not in [each["metadata"]["name"] for each in installation.run_pods()], 120, lambda: name)


@pytest.fixture
def held_queue(installation: DagsterInstallation) -> Iterator[None]:
    """Stop admission during the block."""
    installation.stop_queue("Hold")
    yield
    installation.stop_queue("None")


@pytest.mark.usefixtures("held_queue")
def test_program_of_a_cancelled_run_whose_worker_was_lost_is_cancelled(
    installation: DagsterInstallation, tmp_path: Path
) -> None:
    """A dataset check works for no job: only its run records the cancellation."""
    records = tmp_path / "records.jsonl"
    records.write_text('{"instruction": "Who keeps the lamp?", "answer": "She does."}\n')
    create_version(installation.database, installation.store, name="small", path=records, user="ann", organization="default")
    wait_until(lambda: installation.programs(Program.VALIDATE) != [], 120, lambda: installation.log("daemon"))
    (row,) = installation.programs(Program.VALIDATE)
    program = JobRef(row.job_id, row.program)
    (run,) = installation.instance.get_runs(dg.RunsFilter(tags={"hanzo_ml/validate": program.id}))
    kill_worker(run.run_id)
    installation.instance.run_coordinator.cancel_run(run.run_id)
    assert installation.observe(program).phase is Phase.PENDING
    ended = installation.wait_for(program, Phase.FAILED)
    assert ended.reason is ExitReason.CANCELLED
    found = installation.instance.get_run_by_id(run.run_id)
    assert found is not None and found.status is dg.DagsterRunStatus.CANCELED


@pytest.fixture
def base_model(installation: DagsterInstallation, tmp_path: Path) -> dict[str, str]:
    """Store a tiny model in the object store; return it as a recipe names it."""
    folder = make_tiny_model(tmp_path / "model")
    reference = {"uri": folder.as_uri(), "sha256": hash_model_folder(folder)}
    resolve_base_model(
        Recipe.named("smollm2-135m-lora").changed({"base_model": reference}).base_model, installation.store, tmp_path
    )
    return reference


@pytest.mark.requirement("A8")
def test_chain_that_is_launched_in_the_ui_ends_in_a_registered_version(
    installation: DagsterInstallation, base_model: dict[str, str]
) -> None:
    installation.start_ui()
    chain, endless = (f"{name}-{uuid4().hex[:6]}" for name in ("chain", "endless"))  # installations share their buckets
    dataset = installation.launch([["datasets", "ellarin", step] for step in ("version", "train", "validation", "test")])
    peaks = {"dataset": installation.wait_for_end(dataset)}

    installation.add_partition("sandbox-runs", chain)
    config: dict[str, Any] = {"name": chain, "dataset": "ellarin", "parameters": GANG_RECIPE | {"base_model": base_model}}
    training = installation.launch([["models", "sandbox", "checkpoint"]], chain, config)
    peaks["training"] = installation.wait_for_end(training)
    assert "train is running" in installation.messages(training)
    stdout, stderr = installation.download_logs(training)
    assert "step 4/4 loss" in stdout and "STEP_START" in stderr
    (event,) = [event for event in installation.read_events("job.started") if event.key == chain]
    assert len(set(event.payload["node_ids"])) == 2 and event.payload["gpu_ids"] == []

    wait_until(lambda: installation.find_evaluation(chain) is not None, 60, lambda: installation.log("daemon"))
    peaks["evaluation"] = installation.wait_for_end(str(installation.find_evaluation(chain)))
    with installation.database.read() as connection:
        (version,) = Registry(installation.database).list_by_run("default", chain, connection)
    assert version.stage == "staging" and "gguf" in version.artifacts
    print("peak memory of run workers:", {name: f"{peak / 1e6:.0f} MB" for name, peak in peaks.items()})
    assert min(peaks.values()) > 0 and max(peaks.values()) < MEMORY_BYTES

    installation.add_partition("sandbox-runs", endless)
    config |= {"name": endless, "parameters": config["parameters"] | {"max_steps": 100_000}}
    cancelled = installation.launch([["models", "sandbox", "checkpoint"]], endless, config)
    job = JobRef(endless, Program.TRAIN)
    wait_until(lambda: installation.jobs.find(job) is not None, 120, lambda: installation.messages(cancelled))
    installation.wait_for(job, Phase.RUNNING)
    installation.terminate(cancelled)
    installation.wait_for_end(cancelled, "CANCELED")
    assert installation.wait_for(job, Phase.FAILED).reason is ExitReason.CANCELLED
    wait_until(
        lambda: installation.records.read(endless).status == "cancelled", 60, lambda: installation.messages(cancelled)
    )


def test_page_of_a_failed_run_says_why_its_job_failed(installation: DagsterInstallation) -> None:
    installation.start_ui()
    job = installation.submit_command("failing", "import sys; print('on the way', flush=True); sys.exit(3)")
    installation.wait_for_status(job, "failed")
    (run,) = installation.runs(job)
    (failure,) = [
        event for event in installation.run_events(run.run_id) if event["__typename"] == "ExecutionStepFailureEvent"
    ]
    assert "the command exited with 3" in failure["error"]["message"]
    entries = {entry["label"]: entry.get("text") for entry in failure["failureMetadata"]["metadataEntries"]}
    assert entries["hanzo_ml/exit_reason"] == "program_error"
    assert "command has failed: the command exited with 3" in installation.messages(run.run_id)
    stdout, _ = installation.download_logs(run.run_id)
    assert "on the way" in stdout
    assert f"{installation.url}/v1/jobs/{job.id}/logs" in installation.messages(run.run_id)


@pytest.mark.cluster_slow
def test_run_pod_on_a_lost_node_is_replaced_within_two_minutes(installation: DagsterInstallation) -> None:
    job, run = started(installation, "node-lost", 300)
    (gang,) = installation.gang_pods(job)
    (pod,) = installation.run_pods(run)
    if pod["spec"]["nodeName"] == gang["spec"]["nodeName"]:  # the test is about the supervisor alone
        installation.cluster.kubectl("cordon", gang["spec"]["nodeName"])
        installation.cluster.kubectl("delete", "pod", pod["metadata"]["name"], f"--namespace={installation.name}")
        run = installation.wait_for_run(job, after=run)
        installation.cluster.kubectl("uncordon", gang["spec"]["nodeName"])
        (pod,) = installation.run_pods(run)
    node = pod["spec"]["nodeName"]
    move_controllers(installation.cluster, node)
    installation.cluster.kill_node(node)
    try:
        replaced = installation.wait_for_run(job, after=run, within=REPLACED_WITHIN)
        assert [pod["metadata"]["labels"]["dagster/run-id"] for pod in installation.run_pods()] == [replaced.run_id]
    finally:
        installation.cluster.add_node(int(node.removeprefix("node-")))
    (attempt,) = installation.attempts.list(job)
    assert attempt.claimed_by == gang["metadata"]["uid"]
    end(installation, job)


@pytest.mark.cluster_slow
def test_outage_of_the_api_server_fails_no_run(installation: DagsterInstallation) -> None:
    job, run = started(installation, "outage", 600)
    installation.cluster.control_plane.kill("apiserver")
    try:
        waiting = installation.submit_loop("submitted-meanwhile", 5)
        time.sleep(OUTAGE_SECONDS)
        assert installation.runs(job)[0].status == dg.DagsterRunStatus.STARTED
    finally:
        installation.cluster.control_plane.start("apiserver")
    installation.wait_for_status(waiting, "completed")
    assert [each.run_id for each in installation.runs(job, dg.DagsterRunStatus.STARTED)] == [run.run_id]
    end(installation, job)
