"""Jobs on a real Kubernetes cluster: how long a start takes by phase, and what a queue of 500 jobs costs.

The same training of a tiny model on one pod and as a process of this machine; then 500 jobs that wait in Kueue's queue: how
often the API server is asked, and the controller's CPU and memory, before and while they wait.
The test cluster must run: `python -m tests.cluster up`. Usage: `python -m benchmarks.cluster`.
"""

import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from recipes.contracts.job import Hardware, Job, Tracking
from recipes.export.base_model import resolve_base_model
from resources.compute.base import Compute, Follower, Phase
from resources.compute.kubernetes.gang import base_name
from resources.compute.local.backend import LocalCompute
from resources.jobs.job_tokens import JobCredentials
from resources.metadata.jobs import Jobs
from tests.cluster.cluster import Cluster
from tests.cluster.installation import Installation
from tests.recipes.training.training_workspace import Place

QUEUED = 500
MEASURED_SECONDS = 30.0
SETTLED_WITHIN = 900.0
POLL_SECONDS = 0.05
REQUESTS = re.compile(r"^apiserver_request_total\{[^}]*\} (\S+)$", re.MULTILINE)


def main() -> None:
    cluster = Cluster()
    if not cluster.is_running():
        sys.exit("no test cluster runs: start one with `python -m tests.cluster up`")
    folder = Path(tempfile.mkdtemp(prefix="hanzo-ml-benchmark-"))
    with cluster.entered(), Installation(cluster, "bench", folder / "home") as installation:
        place = Place(folder, installation.store)
        resolve_base_model(place.recipe.base_model, installation.store, folder)
        compare_starts(installation, place)
        measure_queue(installation, place)
    shutil.rmtree(folder)


def compare_starts(installation: Installation, place: Place) -> None:
    """Seconds since the submission: on the cluster by phase, and as a process of this machine."""
    (place.folder / "here").mkdir()
    local_place = Place(place.folder / "here")  # its objects in a folder, as on a laptop
    local = LocalCompute(place.folder / "jobs", credentials=JobCredentials(installation.database))
    ends = {}
    for where, compute, source in (("cluster", installation.compute, place), ("here", local, local_place)):
        job = make_training(installation, source, where)
        ends[where] = measure_start(installation, compute, job)
        if where == "cluster":
            row, (attempt,) = installation.jobs.get(job), installation.attempts.list(job)
            admitted_at = max(row.admitted_at or 0, row.created_at)  # Kueue tells whole seconds
            ends[where]["admitted"] = (admitted_at - row.created_at) / 1000
            ends[where]["attempt claimed"] = (attempt.started_at - row.created_at) / 1000
    print(f"\n{'seconds since the submission':<40}{'cluster':>10}{'here':>10}{'ratio':>8}")
    for name in ("admitted", "attempt claimed", "first step logged", "result"):
        on_cluster, here = ends["cluster"][name], ends["here"].get(name)
        ratio = f"{here:>10.1f}{on_cluster / here:>8.2f}" if here else ""
        print(f"{name:<40}{on_cluster:>10.1f}{ratio}")


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


def measure_queue(installation: Installation, place: Place) -> None:
    """What the controller and the API server do while nothing changes."""
    print(f"\n{'while nothing changes':<40}{'API requests/s':>16}{'controller CPU':>16}{'memory':>10}")
    report_load(installation, "no job")
    begun = time.monotonic()
    for number in range(QUEUED):  # more GPUs than there are: they wait
        job = place.job(place.folder / f"queued-{number}", {}).model_copy(
            update={"hardware": Hardware(gpus=1000), "tracking": None}
        )
        installation.jobs.submit(job, installation.name, base_name(job))
    wait_until_settled(lambda: count_waiting(installation) == QUEUED)
    queued = time.monotonic() - begun
    report_load(installation, f"{QUEUED} jobs in the queue")
    print(f"\n{QUEUED} jobs are in Kueue's queue {queued:.0f} s after the first was submitted")
    for row in installation.jobs.active():
        installation.jobs.want_cancel(row)
    wait_until_settled(lambda: installation.jobs.count_active() == 0)


def count_waiting(installation: Installation) -> int:
    return sum(row.phase is Phase.PENDING and "nvidia.com/gpu" in row.detail for row in installation.jobs.active())


def wait_until_settled(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SETTLED_WITHIN
    while not holds():
        if time.monotonic() > deadline:
            sys.exit(f"not settled within {SETTLED_WITHIN:.0f} s")
        time.sleep(1)


def report_load(installation: Installation, name: str) -> None:
    process = psutil.Process(installation.pid("controller"))
    requests, cpu = count_requests(installation), sum(process.cpu_times()[:2])
    time.sleep(MEASURED_SECONDS)
    per_second = (count_requests(installation) - requests) / MEASURED_SECONDS
    share = (sum(process.cpu_times()[:2]) - cpu) / MEASURED_SECONDS
    print(f"{name:<40}{per_second:>16.1f}{share:>16.1%}{process.memory_info().rss / 1e6:>7.0f} MB", flush=True)


def count_requests(installation: Installation) -> float:
    """Of everybody, the cluster's own components among them."""
    return sum(float(number) for number in REQUESTS.findall(installation.cluster.kubectl("get", "--raw", "/metrics")))


if __name__ == "__main__":
    main()
