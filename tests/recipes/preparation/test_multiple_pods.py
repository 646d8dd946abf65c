"""A preparation shared by pods that have only the store in common and may die."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from recipes.contracts.job import Job, Result
from recipes.storage.artifact_store import Store
from resources.compute.kubernetes.pod_manifest import JOB_FILE
from tests.recipes.preparation.preparation_workspace import Place
from tests.resources.compute.kubernetes.jobs import launched
from tests.support.recipes.feature_table import FEATURES, table
from tests.support.recipes.mixed_records import EVERYTHING, SMALL, mixed
from tests.support.s3_server import VARIABLES, S3Server

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
PODS = 3
LONG = 120.0
CHUNK_BYTES = 7_000
KILLS = ("read", 0), ("encode", 1), ("spread", 2), ("delivered", 0)
"""Stage after whose first files a pod is killed, and the rank of that pod."""
SCRIPT = f"""
import sys
from functools import partial
from recipes.prepare import main, prepare
if __name__ == "__main__":
    main(partial(prepare, rank=int(sys.argv[2]), **{SMALL}))
"""


class Pods:
    """The pods of a job, started as in Kubernetes but with small units."""

    def __init__(self, job: Job, folder: Path) -> None:
        self._folder = folder
        self._job = job
        self.started: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, rank: int, name: str) -> subprocess.Popen[bytes]:
        folder = self._folder / f"{rank}-{name}"
        folder.mkdir(parents=True)
        mine = {"work_dir": str(folder / "work"), "cache_dir": str(folder / "cache"), "pods": PODS}
        job = self._job.model_copy(update=mine)
        (folder / "job.json").write_text(job.model_dump_json())
        assert launched(job, rank=rank)[1:] == ["-m", "recipes.prepare", JOB_FILE, str(rank)]
        script = folder / "small_units.py"
        script.write_text(SCRIPT)
        words = [sys.executable, str(script), str(folder / "job.json"), str(rank)]
        env = {**os.environ, **VARIABLES, "PYTHONPATH": str(ROOT)}
        with (folder / "log").open("wb") as log:
            self.started[rank] = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log, env=env, start_new_session=True)
        return self.started[rank]

    def until(self, store: Store, below: str, count: int = 1) -> None:
        """Wait until the pods have exchanged `count` files of a stage."""
        end = time.monotonic() + LONG
        while sum(f"/{below}/" in uri for uri in store.list(self.given)) < count:
            assert time.monotonic() < end, self.said()
            assert all(process.poll() in (None, -signal.SIGKILL) for process in self.started.values()), self.said()
            time.sleep(0.01)

    @property
    def given(self) -> str:
        return f"{self._job.result_uri.rpartition('/')[0]}/_pods"

    def kill(self, rank: int) -> None:
        """Kill the pod's whole session, including its child processes."""
        os.killpg(self.started[rank].pid, signal.SIGKILL)
        self.started[rank].wait()

    def wait(self) -> None:
        for process in self.started.values():
            assert process.wait(LONG) == 0, self.said()

    def said(self) -> str:
        return "\n".join(f"--- {log.parent.name}\n{log.read_text()[-2000:]}" for log in sorted(self._folder.glob("*/log")))


def made_by_one(folder: Path, rows: list[Any]) -> tuple[Place, dict[str, Any], Result]:
    place = Place(folder, rows, SMALL)
    wanted = {**EVERYTHING, "tokenize": place.tokenize(max_length=64)}
    return place, wanted, place.prepare(wanted)


def compare(result: Result, expected: Result) -> None:
    assert result.artifacts == expected.artifacts
    assert (result.facts, result.metrics, result.work_digest) == (expected.facts, expected.metrics, expected.work_digest)


def test_three_pods_that_each_die_once_produce_the_same_bytes_as_one_process(tmp_path: Path) -> None:
    rows = mixed(400)
    alone, wanted, expected = made_by_one(tmp_path / "alone", rows)
    shared = Place(tmp_path / "shared", rows)
    pods = Pods(shared.job(wanted), tmp_path / "pods")
    for rank in range(PODS):
        pods.start(rank, "first")
    for stage, victim in KILLS:
        pods.until(shared.store, stage)
        pods.kill(victim)
        pods.start(victim, f"after-{stage}")  # with empty folders, like a new pod
    pods.wait()
    result = Result.model_validate_json(shared.store.get_bytes(shared.job(wanted).result_uri))
    compare(result, expected)
    assert shared.files(result) == alone.files(expected)
    assert shared.store.list(pods.given) == []
    late = [pods.start(rank, "late") for rank in range(PODS)]  # the work is done: they exit at once and change nothing
    assert [process.wait(LONG) for process in late] == [0] * PODS
    assert shared.store.list(pods.given) == []


@pytest.mark.long
def test_pods_share_work_through_s3(tmp_path: Path, s3: S3Server) -> None:
    rows = mixed(400)
    alone, wanted, made_of_a_file = made_by_one(tmp_path / "alone", rows)
    here = Place(tmp_path / "here", rows, SMALL, chunk_bytes=CHUNK_BYTES)
    expected = here.prepare(wanted)
    assert here.files(expected) == alone.files(made_of_a_file)
    shared = Place(tmp_path / "shared", rows, store=Store(s3.address, VARIABLES), chunk_bytes=CHUNK_BYTES)
    pods = Pods(shared.job(wanted), tmp_path / "pods")
    for rank in range(PODS):
        pods.start(rank, "first")
    pods.wait()
    compare(Result.model_validate_json(shared.store.get_bytes(shared.job(wanted).result_uri)), expected)


def test_unpreparable_input_is_reported_by_first_pod(tmp_path: Path) -> None:
    shared = Place(tmp_path / "shared", [{"foo": 1}] * 3)
    pods = Pods(shared.job({}), tmp_path / "pods")
    first = pods.start(0, "first")
    other = pods.start(1, "first")
    assert pods.start(2, "first").poll() is None
    assert first.wait(LONG) == 78, "which ends the whole Job on a cluster"
    assert other.poll() is None
    assert "no record is left: 3 no layout" in pods.said()
    for rank in (1, 2):
        pods.kill(rank)


def test_pod_restarted_after_result_was_stored_exits_without_waiting(tmp_path: Path) -> None:
    """The files it waited for are deleted; those it delivered since are cleaned up too."""
    shared = Place(tmp_path / "shared", mixed(400))
    job = shared.job({})
    pods = Pods(job, tmp_path / "pods")
    again = pods.start(2, "again")
    pods.until(shared.store, "read")
    assert again.poll() is None
    done = Result(work_digest=job.model_copy(update={"pods": PODS}).work_digest)
    shared.store.put_bytes(job.result_uri, done.model_dump_json().encode())
    pods.wait()
    assert shared.store.list(pods.given) == []


def test_feature_fitting_on_s3_survives_pod_deaths_with_identical_files(tmp_path: Path, s3: S3Server) -> None:
    rows, wanted = table(600), {"features": FEATURES, "filter": {"dedup": False}}
    alone = Place(tmp_path / "alone", rows, SMALL)
    expected = alone.prepare(wanted)
    shared = Place(tmp_path / "shared", rows, store=Store(s3.address, VARIABLES))
    pods = Pods(shared.job(wanted), tmp_path / "pods")
    for rank in range(PODS):
        pods.start(rank, "first")
    for stage, victim in (("fit", 1), ("features", 0)):
        pods.until(shared.store, stage)
        pods.kill(victim)
        pods.start(victim, f"after-{stage}")
    pods.wait()
    result = Result.model_validate_json(shared.store.get_bytes(shared.job(wanted).result_uri))
    compare(result, expected)
    assert shared.files(result) == alone.files(expected)
    assert shared.store.list(pods.given) == []
