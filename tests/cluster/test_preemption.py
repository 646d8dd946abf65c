"""Preempted jobs save, wait and resume where they stopped, in any state and repeatedly."""

import json
import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from recipes.contracts.exit_reason import ExitReason
from recipes.contracts.job import Hardware, Job, Schedule
from resources.compute.base import Phase
from resources.jobs.resume import LOSS_METRIC
from resources.metadata.tracking.metrics import Metrics
from tests.cluster.cluster import Cluster
from tests.cluster.command_jobs import submit
from tests.cluster.installation import Installation, wait_until
from tests.cluster.trainings import Trainings, assert_equal, pods_of, train_locally
from tests.cluster.urgent_work import urgent_work

pytestmark = [pytest.mark.cluster, pytest.mark.cluster_slow]

PREEMPTIONS = 13
"""The highest number of consecutive preemptions of a job on a spot market."""
UNSTARTED = 5
"""The preemption that happens before or as soon as the program has started again."""
STEPS = 1500
"""Enough that the training is not finished before the last preemption."""
LOW: Any = {"priority": "low"}


@pytest.fixture(scope="module")
def installation(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    folder = tmp_path_factory.mktemp("installation")
    with Installation(cluster, "preemption", folder, gpus=16) as installation:
        yield installation


@pytest.fixture(scope="module")
def trainings(installation: Installation, tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    return Trainings.in_folder(installation, tmp_path_factory.mktemp("trainings"))


@pytest.mark.requirement("J3")
@pytest.mark.timeout(1800)
def test_repeatedly_preempted_training_is_bit_equal_to_an_undisturbed_one(
    installation: Installation, trainings: Trainings, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With one process, which starts quickly. `test_gang` and `test_elastic` cover gangs."""
    recipe = {"distributed": None}
    hardware, schedule = Hardware(gpus=8), Schedule(**LOW, retries=0)
    job = trainings.job("preempted", steps=STEPS, recipe=recipe, hardware=hardware, schedule=schedule)
    installation.compute.submit(job)
    for number in range(PREEMPTIONS):
        if number == UNSTARTED:
            installation.wait_for(job, Phase.RESTARTING, Phase.RUNNING)
        else:
            installation.wait_for(job, Phase.RUNNING)
            installation.wait_for_step(job, installation.last_step(job) + 1)
        with urgent_work(installation, pods=2):
            installation.wait_for(job, Phase.SUSPENDED)
    installation.wait_for(job, Phase.RUNNING)
    assert count_preemptions(installation, job) == PREEMPTIONS
    installation.wait_for(job, Phase.SUCCEEDED)
    *preempted, last = installation.attempts.list(job)
    assert last.reason is ExitReason.COMPLETED
    assert {attempt.reason for attempt in preempted} == {ExitReason.PREEMPTED}
    assert not any(attempt.counted for attempt in preempted)
    assert sum("holds everything" in attempt.message for attempt in preempted) >= PREEMPTIONS - 1
    undisturbed = train_locally(tmp_path_factory.mktemp("undisturbed"), {**recipe, "max_steps": STEPS})
    assert_equal(trainings.trained(job), undisturbed)
    assert job.tracking is not None
    logged = Metrics(installation.database).history(job.tracking.run_id, LOSS_METRIC, limit=2 * STEPS).points
    assert [point.step for point in logged] == list(range(1, STEPS + 1))
    assert [point.value for point in logged] == [undisturbed.losses[step] for step in range(1, STEPS + 1)]


def count_preemptions(installation: Installation, job: Job) -> int:
    """Return Kueue's own count."""
    evictions = workload_of(installation, job)["status"]["schedulingStats"]["evictions"]
    return sum(each["count"] for each in evictions if each["reason"] == "Preempted")


def workload_of(installation: Installation, job: Job) -> dict[str, Any]:
    workloads = installation.cluster.get("workloads", f"--namespace={installation.name}")["items"]
    name = installation.jobs.get(job).name
    [found] = [each for each in workloads if each["metadata"]["ownerReferences"][0]["name"] == name]
    return dict(found)


SAVE_AND_EXIT_WELL = """
import os, pathlib, signal, sys, time
state = pathlib.Path(os.environ["HANZO_ML_CHECKPOINTS"]) / os.environ["NODE_RANK"]
if state.exists():
    print("found what it saved", flush=True)
    sys.exit(0)
def save(number, frame):
    time.sleep(8)
    state.write_text("saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
time.sleep(5)  # the other node listens to the signal too by then
print("works", flush=True)
while True:
    time.sleep(1)
"""
"""It saves slowly, but within its grace period."""


def test_command_that_saves_and_exits_with_zero_on_sigterm_has_not_succeeded(installation: Installation) -> None:
    shape = {"num_nodes": 2, "gpus_per_node": 1, "backend": "gloo"}
    schedule = {**LOW, "grace_period": "60s", "retries": 0}
    job = submit(installation, SAVE_AND_EXIT_WELL, gpus=8, distributed=shape, schedule=schedule)
    wait_until(lambda: count_lines(installation, job, "works") > 0, 120, lambda: installation.describe(job))
    with urgent_work(installation):
        installation.wait_for(job, Phase.SUSPENDED)
        wait_until(lambda: not pods_of(installation, job), 120, lambda: installation.describe(job))
        assert installation.observe(job).phase is Phase.SUSPENDED
    assert installation.wait_for(job, Phase.SUCCEEDED).detail == ""
    first, second = installation.attempts.list(job)
    assert (first.reason, first.counted) == (ExitReason.PREEMPTED, False)
    assert second.reason is ExitReason.COMPLETED and second.is_registered
    assert count_lines(installation, job, "found what it saved") == 1


def count_lines(installation: Installation, job: Job, line: str) -> int:
    """Count lines in the first node's log of all attempts.

    The log also has the words of the command, in longer lines.
    """
    return installation.compute.read_log(job, 0).decode(errors="replace").splitlines().count(line)


WORK = """
import json
import time
print("works", flush=True)
while True:
    time.sleep(1)
"""


def test_time_limit_adds_up_over_attempts_and_does_not_count_waiting(installation: Installation) -> None:
    limit = 60.0
    schedule = {**LOW, "max_duration": f"{limit:g}s", "grace_period": "10s"}
    job = submit(installation, WORK, gpus=8, schedule=schedule)
    wait_until(lambda: sum(seconds_of_attempts(installation, job)) > 15, 120, lambda: installation.describe(job))
    with urgent_work(installation, gpus=8, pods=2):
        installation.wait_for(job, Phase.SUSPENDED)
        [first] = installation.attempts.list(job)
        over = first.started_at / 1000 + limit + 5
        wait_until(lambda: time.time() > over, 120, lambda: installation.describe(job))
        assert installation.observe(job).phase is Phase.SUSPENDED
    ended = installation.wait_for(job, Phase.FAILED)
    assert ended.reason is ExitReason.TIMED_OUT and f"schedule.max_duration ({limit:g}s)" in ended.detail
    first, second = installation.attempts.list(job)
    assert first.reason is ExitReason.PREEMPTED
    assert second.ended_at is not None and second.ended_at - second.started_at < limit * 1000, "its clock began again"


def seconds_of_attempts(installation: Installation, job: Job) -> list[float]:
    now = time.time() * 1000
    return [((attempt.ended_at or now) - attempt.started_at) / 1000 for attempt in installation.attempts.list(job)]


IGNORE_SIGTERM = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("works", flush=True)
while True:
    time.sleep(1)
"""


@pytest.mark.requirement("J9")
def test_preempted_job_is_admitted_on_another_flavor_without_labels_of_the_first(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It ignores SIGTERM, and is killed at the end of its grace period."""
    label, unique = f"preemption.example.com/{uuid4().hex[:6]}", uuid4().hex[:6]
    first, second = f"first-{unique}", f"second-{unique}"
    scheduler = {
        "gpu_types": [first, second],
        "gpu_type_label": label,
        "capacity": {name: {"gpus": 8, "cpu": 8, "memory": "16Gi"} for name in (first, second)},
    }
    folder = tmp_path_factory.mktemp("installation")
    with Installation(cluster, "flavors", folder, scheduler=scheduler) as installation:
        try:
            cluster.kubectl("label", "node", "--all", "--overwrite", f"{label}={first}")
            cluster.kubectl("label", "node", "node-1", "--overwrite", f"{label}={second}")
            job = submit(installation, IGNORE_SIGTERM, gpus=8, schedule={**LOW, "grace_period": "5s", "retries": 0})
            wait_until(lambda: count_lines(installation, job, "works") > 0, 120, lambda: installation.describe(job))
            assert node_selector(installation, job) == {label: first}
            with urgent_work(installation, gpus=8, node_labels={label: first}):
                wait_until(lambda: len(installation.attempts.list(job)) == 2, 120, lambda: installation.describe(job))
                installation.wait_for(job, Phase.RUNNING)
                assert node_selector(installation, job) == {label: second}
            attempts = installation.attempts.list(job)
            assert "node-1" not in attempts[0].nodes and attempts[1].nodes == ["node-1"]
            assert (attempts[0].reason, attempts[0].counted) == (ExitReason.PREEMPTED, False)
            installation.compute.cancel(job)
            installation.wait_for(job, Phase.FAILED)
        finally:
            cluster.kubectl("label", "node", "--all", f"{label}-")
    cluster.kubectl("delete", "resourceflavor", first, second)


def node_selector(installation: Installation, job: Job) -> dict[str, str]:
    """Return the selector of the pods that the job's JobSet creates now."""
    found = installation.cluster.get("jobset", installation.jobs.get(job).name, f"--namespace={installation.name}")
    spec = found["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    return dict(spec.get("nodeSelector", {}))


SAVE_SLOWLY = """
import os, pathlib, signal, sys, time
state = pathlib.Path(os.environ["HANZO_ML_CHECKPOINTS"]) / "state"
if state.exists():
    sys.exit(0)
def save(number, frame):
    time.sleep({seconds})
    state.write_text("saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("works", flush=True)
while True:
    time.sleep(1)
"""


def test_preempted_job_is_not_readmitted_while_another_victim_still_saves(
    installation: Installation,
) -> None:
    """Two victims of one urgent job end at different times: kueue PR #13797."""
    jobs = [
        submit(installation, SAVE_SLOWLY.format(seconds=seconds), gpus=8, schedule={**LOW, "grace_period": "60s"})
        for seconds in (0, 15)
    ]

    def describe() -> str:
        return "\n".join(map(installation.describe, jobs))

    wait_until(lambda: all(count_lines(installation, job, "works") for job in jobs), 120, describe)
    with urgent_work(installation, gpus=8, pods=2) as name:
        wait_until(lambda: is_running(installation, name), 120, describe)
    for job in jobs:
        installation.wait_for(job, Phase.SUCCEEDED)
        attempts = installation.attempts.list(job)
        assert [attempt.reason for attempt in attempts] == [ExitReason.PREEMPTED, ExitReason.COMPLETED]


PODS_READY = """
waitForPodsReady:
  timeout: 10m
  recoveryTimeout: 10s
  requeuingStrategy: {backoffBaseSeconds: 1}
"""
CONFIGURATION = "controller_manager_config.yaml"
KUEUE = "kueue-system"


@pytest.fixture
def kueue_waits_for_pods(cluster: Cluster) -> Iterator[None]:
    """Have Kueue stop a restarting gang whose pods are not ready again soon.

    Many clusters are configured like this.
    """
    before = cluster.get("configmap", "kueue-manager-config", f"--namespace={KUEUE}")["data"][CONFIGURATION]
    configure_kueue(cluster, before + PODS_READY)
    try:
        yield
    finally:
        configure_kueue(cluster, before)


def configure_kueue(cluster: Cluster, configuration: str) -> None:
    patch = json.dumps({"data": {CONFIGURATION: configuration}})
    deployment = "deployment/kueue-controller-manager"
    cluster.kubectl("patch", "configmap", "kueue-manager-config", f"--namespace={KUEUE}", "--type=merge", f"--patch={patch}")
    cluster.kubectl("rollout", "restart", f"--namespace={KUEUE}", deployment)
    cluster.kubectl("rollout", "status", f"--namespace={KUEUE}", deployment, "--timeout=180s")


@pytest.mark.usefixtures("kueue_waits_for_pods")
def test_gang_stopped_by_kueue_for_a_slow_restart_releases_its_quota(installation: Installation) -> None:
    label = f"preemption.example.com/{uuid4().hex[:6]}"
    cluster = installation.cluster
    cluster.kubectl("label", "nodes", "--all", f"{label}=yes")
    shape = {"num_nodes": 2, "gpus_per_node": 1, "backend": "gloo"}
    job = submit(installation, WORK, gpus=8, distributed=shape, pod={"node_selector": {label: "yes"}})
    installation.wait_for(job, Phase.RUNNING)
    cluster.kubectl("label", "nodes", "--all", f"{label}-")
    pod = pods_of(installation, job)[1]["metadata"]["name"]
    cluster.kubectl("delete", "pod", pod, f"--namespace={installation.name}", "--wait=false")
    wait_until(lambda: has_condition(installation, job, "PodsReadyTimeout"), 120, lambda: installation.describe(job))
    with urgent_work(installation, gpus=8, pods=2) as name:
        wait_until(lambda: is_running(installation, name), 300, lambda: installation.describe(job))
    cluster.kubectl("label", "nodes", "--all", f"{label}=yes")
    installation.wait_for(job, Phase.RUNNING)
    installation.compute.cancel(job)
    installation.wait_for(job, Phase.FAILED)
    cluster.kubectl("label", "nodes", "--all", f"{label}-")


def has_condition(installation: Installation, job: Job, reason: str) -> bool:
    return any(each["reason"] == reason for each in workload_of(installation, job)["status"]["conditions"])


def is_running(installation: Installation, job_name: str) -> bool:
    pods = installation.cluster.get("pods", f"--namespace={installation.name}", f"--selector=job-name={job_name}")["items"]
    return bool(pods) and all(pod["status"]["phase"] == "Running" for pod in pods)
