"""Measure job start times and the cost of a long queue on a Kubernetes cluster.

`start` runs the same training of a tiny model in one pod and as a local process, and reports each phase. `queue` runs 50
jobs on fake nodes, each with a fake run pod, while 500 wait for GPUs.
The test cluster must run: `python -m tests.cluster up`. Usage: `python -m benchmarks.cluster [start] [queue]`.
"""

import re
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil

from recipes.contracts.job import Hardware, Job, Tracking
from recipes.contracts.pod_settings import PodSettings, Toleration
from recipes.export.base_model import resolve_base_model
from recipes.storage.artifact_store import Store
from resources.compute.base import Compute, Follower, Phase
from resources.compute.kubernetes.gang import JOB_APP, JOB_LABEL, base_name
from resources.compute.local.backend import LocalCompute
from resources.jobs.job_tokens import JobCredentials
from resources.metadata.cluster_jobs import ClusterJob
from resources.metadata.job_attempts import Claim
from resources.metadata.jobs import Jobs
from tests.cluster.cluster import FAKE, GPUS, Cluster
from tests.cluster.installation import GPU_TYPE, Installation
from tests.recipes.training.training_workspace import Place

RUNNING, QUEUED = 50, 500
MEASURED_SECONDS = 30.0
SETTLED_WITHIN = 900.0
POLL_SECONDS = 0.05
REQUESTS = re.compile(r"^apiserver_request_total\{[^}]*\} (\S+)$", re.MULTILINE)
ON_FAKE_NODES = PodSettings(node_selector={"type": "fake"}, tolerations=(Toleration(key=FAKE, operator="Exists"),))


def main() -> None:
    wanted = sys.argv[1:] or ["start", "queue"]
    cluster = Cluster()
    if not cluster.is_running():
        sys.exit("no test cluster runs: start one with `python -m tests.cluster up`")
    folder = Path(tempfile.mkdtemp(prefix="hanzo-ml-benchmark-"))
    with cluster.entered():
        if "start" in wanted:
            with Installation(cluster, "bench", folder / "start") as installation:
                compare_starts(installation, folder)
        if "queue" in wanted:
            cluster.add_fake_nodes(-(-RUNNING // GPUS), run_seconds=24 * 3600)
            # Fake pods need no dependencies.
            with Installation(cluster, "queue", folder / "queue", gpus=RUNNING, scheduler={"volumes": []}) as installation:
                measure_queue(installation, folder)
            cluster.remove_fake_nodes()
    shutil.rmtree(folder)


def compare_starts(installation: Installation, folder: Path) -> None:
    """Print seconds since submission, on the cluster by phase and as a local process."""
    place, local_place = (make_place(folder, name, store) for name, store in (("far", installation.store), ("here", None)))
    resolve_base_model(place.recipe.base_model, installation.store, folder)
    local = LocalCompute(folder / "jobs", credentials=JobCredentials(installation.database))
    ends = {}
    for where, compute, source in (("cluster", installation.compute, place), ("here", local, local_place)):
        job = make_training(installation, source, where)
        ends[where] = measure_start(installation, compute, job)
        if where == "cluster":
            row, (attempt,) = installation.jobs.get(job), installation.attempts.list(job)
            admitted_at = max(row.admitted_at or 0, row.created_at)  # Kueue reports whole seconds
            ends[where]["admitted"] = (admitted_at - row.created_at) / 1000
            ends[where]["attempt claimed"] = (attempt.started_at - row.created_at) / 1000
            ends[where]["end reported"] = ((attempt.ended_at or 0) - row.created_at) / 1000
    print(f"\n{'seconds since the submission':<40}{'cluster':>10}{'here':>10}{'ratio':>8}")
    for name in ("admitted", "attempt claimed", "first step logged", "end reported", "result"):
        on_cluster, here = ends["cluster"][name], ends["here"].get(name)
        ratio = f"{here:>10.1f}{on_cluster / here:>8.2f}" if here else ""
        print(f"{name:<40}{on_cluster:>10.1f}{ratio}")


def make_place(folder: Path, name: str, store: Store | None) -> Place:
    """Create a place for jobs; without a store, its objects are in a folder."""
    (folder / name).mkdir()
    return Place(folder / name, store)


def make_training(installation: Installation, place: Place, name: str) -> Job:
    record = Jobs(installation.database).submit(
        name=name, config={"model": name}, user="bench", organization="default", status="running"
    )
    job = place.job(place.folder / record.id, {})
    return job.model_copy(update={"tracking": Tracking(uri=installation.url, run_id=record.id), "hardware": Hardware()})


def measure_start(installation: Installation, compute: Compute, job: Job) -> dict[str, float]:
    begun, found = time.monotonic(), {}
    supervisor = threading.Thread(target=lambda: compute.run(job, Follower(line=ignore, phase=ignore)))
    supervisor.start()
    while supervisor.is_alive():
        if "first step logged" not in found and installation.last_step(job):
            found["first step logged"] = time.monotonic() - begun
        time.sleep(POLL_SECONDS)
    found["result"] = time.monotonic() - begun
    return found


def ignore(_: object) -> None:
    pass


def measure_queue(installation: Installation, folder: Path) -> None:
    """Measure controller and API server during submission, idle time and cancellation."""
    place = make_place(folder, "place", None)
    load = Load(installation)
    print(f"\n{'':<40}{'seconds':>10}{'API requests/s':>16}{'controller CPU':>16}{'memory':>10}")
    time.sleep(MEASURED_SECONDS)
    load.report("no job")
    for number in range(RUNNING + QUEUED):
        job = place.job(folder / f"job-{number}", {}).model_copy(
            update={"hardware": Hardware(gpus=1, gpu_type=GPU_TYPE), "pod": ON_FAKE_NODES, "tracking": None}
        )
        installation.jobs.submit(job, installation.name, base_name(job))
    wait_until_settled(installation, lambda: count(installation, is_running) == RUNNING)
    load.report(f"until {RUNNING} run")
    wait_until_settled(installation, lambda: count(installation, is_explained) == QUEUED)
    load.report(f"until {QUEUED} wait in the queue")
    create_run_pods(installation)
    time.sleep(MEASURED_SECONDS)
    load.restart()
    time.sleep(MEASURED_SECONDS)
    load.report(f"while {RUNNING} run and {QUEUED} wait")
    for row in installation.jobs.active():
        installation.jobs.want_cancel(row)
    wait_until_settled(installation, lambda: installation.jobs.count_active() == 0)
    load.report("until all are cancelled")


def is_running(row: ClusterJob) -> bool:
    return row.phase is Phase.RUNNING


def is_explained(row: ClusterJob) -> bool:
    """Whether a waiting job has a queue position and names the missing quota."""
    return row.phase is Phase.PENDING and row.queue_position is not None and "nvidia.com/gpu" in row.detail


def count(installation: Installation, matches: Callable[[ClusterJob], bool]) -> int:
    return sum(map(matches, installation.jobs.active()))


def wait_until_settled(installation: Installation, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SETTLED_WITHIN
    while not holds():
        if time.monotonic() > deadline:
            sys.exit(
                f"not settled within {SETTLED_WITHIN:.0f} s: {Counter(row.phase for row in installation.jobs.active())}"
            )
        claim_attempts(installation)
        time.sleep(1)


def claim_attempts(installation: Installation) -> None:
    """Claim attempts in place of launchers, which fake pods do not run."""
    pods = installation.cluster.get("pods", f"--namespace={installation.name}", f"--selector=app={JOB_APP}")["items"]
    running = {pod["metadata"]["labels"][JOB_LABEL]: pod for pod in pods if pod["status"]["phase"] == "Running"}
    for row in installation.jobs.active():
        pod = running.get(row.name)
        if pod is not None and row.phase is Phase.STARTING:
            node = pod["spec"]["nodeName"]
            claim = Claim(row.generation, pod["metadata"]["uid"], node_rank=0, num_nodes=1, node=node)
            installation.attempts.claim(row, claim)


def create_run_pods(installation: Installation) -> None:
    """Create a run pod per running job, which only has to be stored."""
    spec = {
        "restartPolicy": "Never",
        "nodeSelector": ON_FAKE_NODES.node_selector,
        "tolerations": [each.model_dump(exclude_none=True) for each in ON_FAKE_NODES.tolerations],
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [
            {
                "name": "dagster",
                "image": "none",
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
            }
        ],
    }
    installation.cluster.apply(
        *(
            {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "metadata": {"name": f"dagster-run-{number}", "namespace": installation.name},
                "spec": {"template": {"spec": spec}},
            }
            for number in range(RUNNING)
        )
    )


class Load:
    """Load of API server and controller since the last report."""

    def __init__(self, installation: Installation) -> None:
        self._installation = installation
        self._process = psutil.Process(installation.pid("controller"))
        self.restart()

    def restart(self) -> None:
        self._at, self._requests, self._cpu = time.monotonic(), count_requests(self._installation), self._used()

    def report(self, name: str) -> None:
        seconds = time.monotonic() - self._at
        requests = (count_requests(self._installation) - self._requests) / seconds
        share, memory = (self._used() - self._cpu) / seconds, self._process.memory_info().rss / 1e6
        print(f"{name:<40}{seconds:>10.0f}{requests:>16.1f}{share:>16.1%}{memory:>7.0f} MB", flush=True)
        self.restart()

    def _used(self) -> float:
        return sum(self._process.cpu_times()[:2])


def count_requests(installation: Installation) -> float:
    """Return the number of API requests of all clients, including the cluster's own components."""
    return sum(float(number) for number in REQUESTS.findall(installation.cluster.kubectl("get", "--raw", "/metrics")))


if __name__ == "__main__":
    main()
