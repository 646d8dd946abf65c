"""Jobs on a real Kubernetes cluster: how long a start takes by phase, and what the controller costs while nothing changes.

The same training of a tiny model on one pod and as a process of this machine.
The test cluster must run: `python -m tests.cluster up`. Usage: `python -m benchmarks.cluster`.
"""

import re
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

from recipes.contracts.job import Hardware, Job, Tracking
from recipes.export.base_model import resolve_base_model
from resources.compute.base import Compute, Follower
from resources.compute.local.backend import LocalCompute
from resources.jobs.job_tokens import JobCredentials
from resources.metadata.jobs import Jobs
from tests.cluster.cluster import Cluster
from tests.cluster.installation import Installation
from tests.recipes.training.training_workspace import Place

MEASURED_SECONDS = 30.0
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
        print(f"\n{'while nothing changes':<40}{'API requests/s':>16}{'controller CPU':>16}{'memory':>10}")
        report_load(installation, "no job")
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
            admitted_at = max(row.admitted_at or 0, row.created_at)  # Kueue reports whole seconds
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
