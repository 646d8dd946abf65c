"""Consecutive faults during a training: its results equal an undisturbed one's.

Compares weights, losses and metrics, and prints how long each fault interrupted training. Only steps that the newest
checkpoint lacks are computed twice.
"""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx
import pytest

from recipes.contracts.exit_reason import ExitReason
from recipes.contracts.job import Hardware, Job, Schedule
from recipes.storage import uris
from resources.compute.base import Phase
from resources.compute.kubernetes.states import RANK_ANNOTATION
from resources.jobs.job_tokens import TOKEN_VARIABLE
from resources.jobs.program_tokens import ClusterCredentials
from resources.jobs.resume import LOSS_METRIC, list_folder_checkpoints
from resources.metadata.job_attempts import Attempt
from tests.cluster import cgroups
from tests.cluster.cluster import Cluster
from tests.cluster.installation import Installation, wait_until
from tests.cluster.job_controllers import LEASES, delete_leader, find_leader, has_other_leader, move_controllers
from tests.cluster.trainings import (
    Trained,
    Trainings,
    assert_equal,
    find_process,
    kill_rank,
    pods_of,
    train_locally,
)

pytestmark = [pytest.mark.cluster, pytest.mark.cluster_slow]

STEPS = 400
INTERVAL_STEPS = 10
RECIPE = {
    "max_steps": STEPS,
    "eval_steps": STEPS // 4,
    "checkpoint": {"interval": "1h", "interval_steps": INTERVAL_STEPS, "keep_last": STEPS},
}
WHOLE_NODE = Hardware(gpus=8)
SLOW, SLOWER = 0.1, 0.03
"""Cores of a pod between two faults, and during consecutive faults: a step takes 30 ms of a core's time, and the training
must not end before the last fault."""
GRACE = "30s"
"""Delay of the next attempt by a pod that hangs."""
GANG_ENDS_WITHIN = 60.0
RECOVERS_WITHIN = 300.0


@dataclass
class Recoveries:
    """The table of faults that is printed at the end."""

    rows: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, fault: str, seconds: float | None, note: str) -> None:
        self.rows.append((fault, "0" if seconds is None else f"{seconds:.0f}", note))

    def print(self, write: Callable[[str], None]) -> None:
        write("| killed | seconds until the next new step | |")
        write("|---|---|---|")
        for row in self.rows:
            write(f"| {' | '.join(row)} |")


@pytest.fixture(scope="module")
def recoveries(request: pytest.FixtureRequest) -> Iterator[Recoveries]:
    recoveries = Recoveries()
    yield recoveries
    terminal = request.config.pluginmanager.getplugin("terminalreporter")
    terminal.write_line("")
    recoveries.print(terminal.write_line)


@pytest.fixture(scope="module")
def installation(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    with Installation(cluster, "recovery", tmp_path_factory.mktemp("installation")) as installation:
        yield installation


@pytest.fixture(scope="module")
def trainings(installation: Installation, tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    return Trainings.in_folder(installation, tmp_path_factory.mktemp("trainings"))


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train_locally(tmp_path_factory.mktemp("undisturbed"), RECIPE)


@dataclass
class DisturbedTraining:
    """A training of two nodes to which faults happen.

    `resumed` is the newest complete checkpoint when an attempt began, by its number; `pod_0` the first pod as it
    started.
    """

    installation: Installation
    trainings: Trainings
    recoveries: Recoveries
    job: Job
    resumed: dict[int, int] = field(default_factory=dict)
    pod_0: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def start(cls, name: str, trainings: Trainings, recoveries: Recoveries, share: float) -> "DisturbedTraining":
        job = trainings.job(name, recipe=RECIPE, hardware=WHOLE_NODE, schedule=Schedule(grace_period=GRACE))
        training = cls(trainings.installation, trainings, recoveries, job)
        began = time.monotonic()
        training.installation.compute.submit(training.job)
        training.wait_for_new_steps()
        recoveries.add("nothing: its first start", time.monotonic() - began, "for comparison")
        training.limit_cpu(share)
        training.pod_0 = training.pod(0)
        return training

    @property
    def step(self) -> int:
        return self.installation.last_step(self.job)

    @property
    def attempts(self) -> list[Attempt]:
        return list(self.installation.attempts.list(self.job))

    def pods(self) -> list[dict[str, Any]]:
        return [pod for pod in pods_of(self.installation, self.job) if "deletionTimestamp" not in pod["metadata"]]

    def pod(self, rank: int) -> dict[str, Any]:
        """Return the pod of a node rank."""
        (found,) = (pod for pod in self.pods() if pod["metadata"]["annotations"][RANK_ANNOTATION] == str(rank))
        return found

    def node(self, rank: int) -> str:
        return str(self.pod(rank)["spec"]["nodeName"])

    def process(self, program: str, rank: int) -> int:
        return find_process(self.installation, self.job, program, NODE_RANK=str(rank))

    def limit_cpu(self, share: float) -> None:
        for pod in self.pods():
            node = self.installation.cluster.nodes[pod["spec"]["nodeName"]]
            cgroups.limit_pod_cpu(node.namespace, pod["metadata"]["uid"], share)

    def newest_checkpoint(self) -> int:
        found = list_folder_checkpoints(self.job.outputs["checkpoints"], self.installation.store)
        return max(found, default=0)

    def wait_for_new_steps(self) -> None:
        self.installation.wait_for_step(self.job, self.step + 1)

    def logged_step(self) -> int:
        """Return the last step in the first pod's output.

        Reads it where its node keeps it, which needs no server.
        """
        uid, node = self.pod_0["metadata"]["uid"], self.installation.cluster.nodes[self.pod_0["spec"]["nodeName"]]
        (log,) = (node.folder / "pod-logs").glob(f"*_{uid}/*/0.log")
        return max(int(step) for step in re.findall(r"step (\d+)/\d+ loss", log.read_text()))

    def endure(
        self, fault: str, kill: Callable[[], object], restart: Callable[[], object], is_ready: Callable[[], bool]
    ) -> None:
        """Cause a fault during which the training continues.

        `restart` is what a machine's service manager would do.
        """
        step = self.logged_step()
        kill()
        wait_until(lambda: self.logged_step() > step + 1, RECOVERS_WITHIN, lambda: f"it stopped with: {fault}")
        began = time.monotonic()
        restart()
        wait_until(is_ready, RECOVERS_WITHIN, lambda: f"not ready after: {fault}\n{self.installation.describe(self.job)}")
        ready = time.monotonic() - began
        self.wait_for_new_steps()
        assert len(self.attempts) == 1, self.installation.describe(self.job)
        self.recoveries.add(fault, None, f"training went on; ready {ready:.0f} s after its start")

    def recover(self, fault: str, kill: Callable[[], object], ends_within: float = RECOVERS_WITHIN) -> Attempt:
        """Cause a fault that ends the attempt, and return it once the next runs."""
        number, last = len(self.attempts), self.installation.describe
        saved = self.newest_checkpoint()
        wait_until(lambda: self.newest_checkpoint() > saved, RECOVERS_WITHIN, lambda: last(self.job))
        began = time.monotonic()
        kill()
        wait_until(lambda: self.attempts[number - 1].ended_at is not None, ends_within, lambda: last(self.job))
        ended = time.monotonic() - began
        wait_until(lambda: len(self.attempts) > number, RECOVERS_WITHIN, lambda: last(self.job))
        self.resumed[number + 1] = self.newest_checkpoint()
        known = self.step
        wait_until(lambda: self.step > known, RECOVERS_WITHIN, lambda: last(self.job))
        seconds = time.monotonic() - began
        self.limit_cpu(SLOW)
        attempt = self.attempts[number - 1]
        self.recoveries.add(fault, seconds, f"gang ended after {ended:.0f} s")
        assert len(self.attempts) == number + 1, last(self.job)
        # Before the next fault, which may lose the last seconds of the log.
        wait_until(lambda: bool(self.computed_steps(number + 1)), RECOVERS_WITHIN, lambda: last(self.job))
        return attempt

    def finish(self) -> Trained:
        """Let the training end at full speed; return its results."""
        self.limit_cpu(2)
        self.installation.wait_for(self.job, Phase.SUCCEEDED)
        wait_until(lambda: not pods_of(self.installation, self.job), 120, lambda: "its pods are not deleted")
        return self.trainings.trained(self.job)

    def history(self, metric: str) -> dict[int, float]:
        """Return all values of a metric by step, as the API gives them.

        Each step must exist once.
        """
        assert self.job.tracking is not None
        query = {"run_id": self.job.tracking.run_id, "metric_key": metric}
        token = ClusterCredentials(self.installation.database).issue(self.job)[TOKEN_VARIABLE]
        url, headers = f"{self.installation.url}/api/2.0/mlflow/metrics/get-history", {"Authorization": f"Bearer {token}"}
        answer = httpx.get(url, params=query, headers=headers)
        points = [(point["step"], point["value"]) for point in answer.raise_for_status().json()["metrics"]]
        assert len({step for step, _ in points}) == len(points), f"{metric} has a step twice"
        return dict(points)

    def computed_steps(self, attempt: int) -> list[int]:
        """Return the steps that an attempt computed, by its log.

        The log of a killed pod lacks the last seconds.
        """
        folder = uris.node_log(self.job.id, self.job.program, attempt, 0)
        store = self.installation.store
        log = b"".join(store.get_bytes(uri) for uri in sorted(store.list(folder))).decode()
        resumed = re.search(r"resuming from checkpoint (\d+)", log)
        steps = [int(step) for step in re.findall(r"step (\d+)/\d+ loss", log)]
        first = (int(resumed[1]) if resumed else 0) + 1
        assert steps == list(range(first, first + len(steps))), f"attempt {attempt} computed {steps}"
        return steps


def assert_nothing_lost_or_doubled(training: DisturbedTraining, trained: Trained, undisturbed: Trained) -> None:
    assert_equal(trained, undisturbed)
    history = training.history(LOSS_METRIC)
    assert sorted(history) == list(range(1, STEPS + 1))
    assert history == undisturbed.losses
    assert sorted(training.history("eval/loss")) == list(range(STEPS // 4, STEPS + 1, STEPS // 4))
    for attempt, checkpoint in training.resumed.items():
        assert training.computed_steps(attempt)[0] == checkpoint + 1, f"attempt {attempt} did not begin at its checkpoint"


def test_training_continues_while_parts_of_the_control_plane_are_killed(
    cluster: Cluster, installation: Installation, trainings: Trainings, undisturbed: Trained, recoveries: Recoveries
) -> None:
    training = DisturbedTraining.start("undisturbed", trainings, recoveries, SLOWER)
    led = times_led(installation)
    training.endure(
        "controller of Hanzo ML",
        partial(installation.kill, "controller"),
        partial(installation.start, "controller"),
        lambda: times_led(installation) > led,
    )
    training.endure(
        "API of Hanzo ML", partial(installation.kill, "api"), partial(installation.start, "api"), installation.is_ready
    )
    for program in ("apiserver", "etcd"):
        control_plane = cluster.control_plane
        kill, start = partial(control_plane.kill, program), partial(control_plane.start, program)
        training.endure(f"Kubernetes {program}", kill, start, cluster.is_running)
    for name in LEASES:
        leader = find_leader(cluster, name)
        training.endure(
            f"controller of {name}",
            partial(delete_leader, cluster, name, leader),
            lambda: None,  # its Deployment starts another pod
            partial(has_other_leader, cluster, name, leader),
        )
    node = cluster.nodes[training.node(1)]
    heartbeat = last_heartbeat(cluster, node.name)
    training.endure(
        "kubelet, started again",
        lambda: node.kill_program("kubelet"),
        lambda: node.start_program("kubelet"),
        lambda: last_heartbeat(cluster, node.name) > heartbeat,
    )
    trained = training.finish()
    (attempt,) = training.attempts
    assert attempt.reason is ExitReason.COMPLETED
    assert trained.resumed_from is None
    assert_nothing_lost_or_doubled(training, trained, undisturbed)


@pytest.mark.requirement("I13")
def test_gang_resumes_from_its_newest_checkpoint_after_each_fault(
    cluster: Cluster, installation: Installation, trainings: Trainings, undisturbed: Trained, recoveries: Recoveries
) -> None:
    training = DisturbedTraining.start("killed", trainings, recoveries, SLOW)

    killed = training.recover("a rank", lambda: kill_rank(installation, training.job, node_rank=1))
    assert (killed.reason, killed.counted) == (ExitReason.KILLED, True)
    assert "node 1: the program was killed (SIGKILL)" in killed.message

    ended = training.recover("a pod's container", lambda: os.kill(training.process("recipes.launcher", 1), signal.SIGKILL))
    assert (ended.reason, ended.counted) == (ExitReason.KILLED, True)

    pod = training.pod(1)["metadata"]["name"]
    deleted = training.recover(
        "a pod, deleted", lambda: cluster.kubectl("delete", "pod", pod, f"--namespace={installation.name}", "--wait=false")
    )
    assert (deleted.reason, deleted.counted) == (ExitReason.PREEMPTED, False)
    number = deleted.attempt
    assert training.computed_steps(number)[-1] == training.resumed[number + 1]  # it saved: no step is computed twice

    silent = training.pod(1)
    launcher = training.process("recipes.launcher", 1)
    stop = partial(os.kill, launcher, signal.SIGSTOP)
    stopped = training.recover("a pod that stops without a word", stop, GANG_ENDS_WITHIN)
    assert (stopped.reason, stopped.counted) == (ExitReason.NODE_LOST, False)
    assert f"node 1 (pod {silent['metadata']['name']}" in stopped.message and "no heartbeat" in stopped.message

    node = cluster.nodes[training.node(1)]
    move_controllers(cluster, node.name)
    unplugged = training.recover("a node's network", node.unplug, GANG_ENDS_WITHIN)
    node.plug_in()
    assert (unplugged.reason, unplugged.counted) == (ExitReason.NODE_LOST, False)
    assert node.name in unplugged.message
    cluster.wait_for_node(node.name)

    node = cluster.nodes[training.node(1)]
    move_controllers(cluster, node.name)
    unseen = training.recover("a kubelet, for good", partial(node.kill_program, "kubelet"))
    node.start_program("kubelet")
    assert (unseen.reason, unseen.counted) == (ExitReason.NODE_LOST, False)
    cluster.wait_for_node(node.name)

    node = cluster.nodes[training.node(0)]
    move_controllers(cluster, node.name)
    lost = training.recover("a node", node.kill)
    cluster.add_node(node.number)
    assert (lost.reason, lost.counted) == (ExitReason.NODE_LOST, False)

    trained = training.finish()
    assert training.attempts[-1].reason is ExitReason.COMPLETED
    assert_nothing_lost_or_doubled(training, trained, undisturbed)


def times_led(installation: Installation) -> int:
    return (installation.home / "controller.log").read_text().count("leading")


def last_heartbeat(cluster: Cluster, node: str) -> str:
    return str(cluster.get("lease", "--namespace=kube-node-lease", node)["spec"]["renewTime"])
