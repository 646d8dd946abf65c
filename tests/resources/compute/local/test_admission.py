"""Admission: each job holds a slot and its own GPUs while its program lives.

The GPUs are only names here; no driver is queried.
"""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from hanzo_ml_assets.control_plane import ControlPlane
from recipes.contracts.exit_reason import ExitReason
from recipes.contracts.job import RETRIES, Distributed, Job, Program
from recipes.contracts.quantities import pluralize
from resources.compute.base import Observation, Phase
from resources.compute.credentials import NoCredentials
from resources.compute.local import admission, backend, capacity
from resources.compute.local.admission import Admission
from resources.compute.local.backend import LocalCompute
from resources.compute.local.capacity import gpu_names, max_running_jobs
from resources.compute.local.leases import Leases
from resources.compute.local.restarts import Start
from resources.compute.local.work_folder import FAILED_ATTEMPTS_FILE, QUEUED_START_FILE, TIME_START_FILE
from resources.settings.scheduler import Scheduler
from resources.settings.settings import Settings
from resources.stack.detached_process import PID_FILE, lock_folder, write_json_atomic
from tests.support.resources.gpu_admission import GpuMachine, gpu_machine, source
from tests.support.resources.local_backend import until

__all__ = ["source"]


def test_third_job_waits_until_one_of_two_gpus_is_free(tmp_path: Path, source: Path) -> None:
    with gpu_machine(tmp_path, source, "0", "GPU-1f/2") as there:
        first, second, third = (there.submitted(name) for name in ("first", "second", "third"))
        assert [there.on(job) for job in (first, second)] == ["0", "GPU-1f/2"]
        waiting = Observation(Phase.PENDING, 1, "waits for GPUs of this machine: 1 of 2")
        assert there.compute.observe(third) == waiting
        there.compute.submit(third)
        assert there.compute.observe(third) == waiting, "asked again, it goes on waiting"
        before = time.time_ns() // 1_000_000
        assert there.compute.queued_until(third) >= before
        there.end(first)
        assert there.phase(third) is Phase.RUNNING
        until("a while", lambda: time.time_ns() // 1_000_000 > before)
        waited = there.compute.queued_until(third)
        assert before <= waited == there.compute.queued_until(third), "until it started"
        assert there.compute.queued_until(second) == 0
        assert there.on(third) == "0"
        for job in (second, third):
            there.end(job)


def test_a_job_for_several_gpus_is_not_passed_by_small_ones(tmp_path: Path, source: Path) -> None:
    with gpu_machine(tmp_path, source, "0", "1") as there:
        small = there.submitted("small")
        large = there.submitted("large", gpus=2)
        late = there.submitted("late")
        assert there.on(small) == "0"
        for _ in range(3):
            assert [there.phase(job) for job in (late, large)] == [Phase.PENDING, Phase.PENDING]
        there.end(small)
        assert there.phase(late) is Phase.PENDING
        assert there.phase(large) is Phase.RUNNING
        assert there.on(large) == "0,1"
        there.end(large)
        assert there.phase(late) is Phase.RUNNING


def test_abandoned_waiting_job_does_not_block_the_queue(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gpu_machine(tmp_path, source, "0") as there:
        first = there.submitted("first")
        cancelled, lost, last = (there.submitted(name) for name in ("cancelled", "lost", "last"))
        there.compute.cancel(cancelled)
        there.end(first)
        assert there.phase(last) is Phase.PENDING, "one that was submitted before it has a supervisor, for all that is known"
        monkeypatch.setattr(admission, "TICKET_SECONDS", 0.2)
        time.sleep(0.4)
        assert there.phase(last) is Phase.RUNNING
        there.end(last)
        assert there.phase(lost) is Phase.RUNNING, "it is late, and not lost"


def test_killed_job_restarts_on_the_next_free_gpus(tmp_path: Path, source: Path) -> None:
    with gpu_machine(tmp_path, source, "0") as there:
        killed = there.submitted("killed")
        assert there.on(killed) == "0"
        other = there.submitted("other")
        os.kill(json.loads((Path(killed.work_dir) / PID_FILE).read_text()), signal.SIGKILL)
        until("the other one's turn", lambda: there.phase(other) is Phase.RUNNING)
        began = float((Path(killed.work_dir) / TIME_START_FILE).read_text())
        waiting = Observation(Phase.PENDING, 2, "waits for GPUs of this machine: 1 of 1; killed", ExitReason.KILLED)
        assert [there.compute.observe(killed) for _ in range(2)] == [waiting] * 2
        time.sleep(0.5)
        there.end(other)
        assert there.compute.observe(killed) == Observation(Phase.RESTARTING, 2, "killed", ExitReason.KILLED)
        assert float((Path(killed.work_dir) / TIME_START_FILE).read_text()) >= began + 0.5, (
            "what it waited is no time of its own"
        )
        until("its second program", lambda: there.on(killed) == "0 0")
        there.end(killed)


def test_waiting_time_is_credited_once_when_a_supervisor_dies_during_a_start(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: each retried start credited the waiting time again, which extended the job's time limit."""
    with gpu_machine(tmp_path, source, "0") as there:
        killed = there.submitted("killed")
        other = there.submitted("other")
        os.kill(json.loads((Path(killed.work_dir) / PID_FILE).read_text()), signal.SIGKILL)
        until("the other one's turn", lambda: there.phase(other) is Phase.RUNNING)
        assert there.phase(killed) is Phase.PENDING
        used = Start.model_validate_json((Path(killed.work_dir) / QUEUED_START_FILE).read_bytes()).used
        assert used is not None
        time.sleep(0.5)
        there.end(other)

        def die(path: Path, document: object) -> None:
            if path.name == FAILED_ATTEMPTS_FILE:
                raise KeyboardInterrupt
            write_json_atomic(path, document)

        with monkeypatch.context() as patched:
            patched.setattr(backend, "write_json_atomic", die)
            for _ in range(3):
                with pytest.raises(KeyboardInterrupt):
                    there.compute.observe(killed)
        before = time.time()
        assert there.phase(killed) is Phase.RESTARTING
        began = float((Path(killed.work_dir) / TIME_START_FILE).read_text())
        assert before - used <= began <= time.time() - used
        there.end(killed)


def turn(running: int, most: int) -> str:
    return f"waits for its turn: {running} of at most {pluralize(most, 'job')} on this machine run"


def kill(job: Job) -> None:
    os.kill(json.loads((Path(job.work_dir) / PID_FILE).read_text()), signal.SIGKILL)


@pytest.mark.parametrize(
    ("names", "known"), [((), False), ((), True), (("0", "1", "2"), True)], ids=["none-known", "none-allowed", "more-gpus"]
)
def test_running_jobs_without_a_supervisor_count_toward_the_limit(
    tmp_path: Path, source: Path, names: tuple[str, ...], known: bool
) -> None:
    """A program outlives its killed worker, whose Dagster pool slot is free at once.

    Each observation uses a new supervisor.
    """
    with gpu_machine(tmp_path, source, *names, known=known, places=2) as there:
        train = there.submitted("train")
        evaluate = there.submitted("evaluate", program=Program.EVALUATE)
        command = there.submitted("command", program=Program.COMMAND)
        convert = there.submitted("convert", program=Program.CONVERT)
        assert [there.phase(job) for job in (train, evaluate, convert)] == [Phase.RUNNING] * 3, "to convert needs no turn"
        assert [there.compute.observe(command) for _ in range(2)] == [Observation(Phase.PENDING, 1, turn(2, 2))] * 2
        for job in (train, evaluate):
            there.compute.submit(job)  # a retry reattaches to it
            assert there.phase(job) is Phase.RUNNING
        there.end(evaluate)
        assert there.phase(command) is Phase.RUNNING
        for job in (train, command, convert):
            there.end(job)


def test_restarted_job_waits_for_its_turn_without_using_its_time(tmp_path: Path, source: Path) -> None:
    with gpu_machine(tmp_path, source, known=False, places=1) as there:
        killed = there.submitted("killed")
        assert there.on(killed)
        other, cancelled, last = (there.submitted(name) for name in ("other", "cancelled", "last"))
        kill(killed)
        until("the other one's turn", lambda: there.phase(other) is Phase.RUNNING)
        began = float((Path(killed.work_dir) / TIME_START_FILE).read_text())
        assert there.phase(last) is Phase.PENDING
        assert there.compute.observe(killed) == Observation(Phase.PENDING, 2, f"{turn(1, 1)}; killed", ExitReason.KILLED)
        there.compute.cancel(cancelled)
        time.sleep(0.5)
        there.end(other)
        assert there.compute.observe(killed) == Observation(Phase.PENDING, 2, f"{turn(0, 1)}; killed", ExitReason.KILLED), (
            "another waits longer"
        )
        assert there.phase(last) is Phase.RUNNING
        there.end(last)
        assert there.compute.observe(killed) == Observation(Phase.RESTARTING, 2, "killed", ExitReason.KILLED)
        assert float((Path(killed.work_dir) / TIME_START_FILE).read_text()) >= began + 0.5
        there.end(killed)


def test_running_jobs_count_toward_a_changed_limit(tmp_path: Path, source: Path) -> None:
    with gpu_machine(tmp_path, source, known=False, places=3) as there:
        jobs = [there.submitted(f"job-{number}") for number in range(3)]
        there.leases = Leases(there.leases.folder, None, 2)
        late, last = there.submitted("late"), there.submitted("last")
        assert there.compute.observe(late) == Observation(Phase.PENDING, 1, turn(3, 2))
        there.end(jobs[0])  # whose slot is one of the two that remain
        assert there.compute.observe(late) == Observation(Phase.PENDING, 1, turn(2, 2))
        there.end(jobs[1])
        assert [there.phase(job) for job in (late, last)] == [Phase.RUNNING, Phase.PENDING]
        there.leases = Leases(there.leases.folder, None, 3)
        assert there.phase(last) is Phase.RUNNING
        for job in (jobs[2], late, last):
            there.end(job)


def test_job_waiting_for_gpus_holds_none_and_reports_its_reason(tmp_path: Path, source: Path) -> None:
    with gpu_machine(tmp_path, source, "0", "1", places=2) as there:
        small, large = there.submitted("small"), there.submitted("large", gpus=2)
        assert there.compute.observe(large) == Observation(Phase.PENDING, 1, "waits for GPUs of this machine: 2 of 2")
        there.end(small)
        assert there.phase(large) is Phase.RUNNING
        assert there.on(large) == "0,1"
        there.end(large)


def test_running_jobs_are_limited_by_the_settings(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("HANZO_ML_") and not name.endswith("_PORT")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HANZO_ML_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HANZO_ML_SCHEDULER_DEVICES", "")
    monkeypatch.setenv("HANZO_ML_SCHEDULER_JOBS_AT_ONCE", "2")
    plane = ControlPlane()
    plane.database.migrate()
    compute = plane.compute
    assert isinstance(compute, LocalCompute)
    compute.source = source
    there = GpuMachine(tmp_path, source, None)
    jobs = [there.job(f"job-{number}") for number in range(3)]
    try:
        for job in jobs:
            compute.submit(job)
        assert [compute.observe(job).phase for job in jobs] == [Phase.RUNNING, Phase.RUNNING, Phase.PENDING]
    finally:
        for job in jobs:
            compute.cancel(job)


def test_job_gets_its_requested_gpus_up_to_those_installed(tmp_path: Path) -> None:
    four = Admission(Leases(tmp_path, ("0", "1", "2", "3")))
    there = GpuMachine(tmp_path, tmp_path, None)
    assert [four.required_gpus(there.job("j", gpus)) for gpus in (0, 1, 3, 8)] == [1, 1, 3, 4]
    assert four.required_gpus(there.job("j", distributed=Distributed(gpus_per_node=2))) == 2
    assert four.required_gpus(there.job("j", 2, program=Program.PREPARE)) == 0
    assert Admission(there.leases).required_gpus(there.job("j", 2)) == 0


@pytest.mark.parametrize("known", [False, True])
def test_program_sees_all_gpus_when_none_are_known_and_none_when_none_are_allowed(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with gpu_machine(tmp_path, source, known=known) as there:
        jobs = [there.submitted(name) for name in ("first", "second")]
        assert [there.on(job) for job in jobs] == ["" if known else "all"] * 2


def test_start_without_credentials_does_not_count(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: each poll during a metadata outage counted as a start and failed the job."""
    away = True

    def issue(_self: NoCredentials, _job: Job) -> dict[str, str]:
        if away:
            raise ConnectionError
        return {}

    with gpu_machine(tmp_path, source, "0") as there:
        first, second = (there.submitted(name) for name in ("first", "second"))
        monkeypatch.setattr(NoCredentials, "issue", issue)
        there.end(first)
        for _ in range(RETRIES + 3):
            with pytest.raises(ConnectionError):
                there.compute.observe(second)
        away = False
        assert there.compute.observe(second) == Observation(Phase.RUNNING, 1)
        there.end(second)


def test_admission_is_exclusive_and_skips_vanished_tickets(tmp_path: Path, source: Path) -> None:
    """Two concurrent admissions could otherwise each take half of what both need."""
    with gpu_machine(tmp_path, source, "0") as there:
        job, folder = there.job("mine"), there.leases.folder
        folder.mkdir()
        (folder / "cancelled.waits").symlink_to("gone")  # listed, but deleted before it is read
        with lock_folder(folder) as descriptor:
            assert descriptor is not None
            with Admission(there.leases).admit(job) as lease:
                assert lease is None
        with Admission(there.leases).admit(job) as lease:
            assert lease is not None and lease.gpus == ("0",)


def test_job_with_a_failed_start_keeps_its_place_in_the_queue(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: one second without metadata moved the longest-waiting job to the end of the queue."""
    unlucky = "second"

    def issue(_self: NoCredentials, job: Job) -> dict[str, str]:
        if job.id == unlucky:
            raise ConnectionError
        return {}

    monkeypatch.setattr(NoCredentials, "issue", issue)
    with gpu_machine(tmp_path, source, "0") as there:
        first, second, third = (there.submitted(name) for name in ("first", "second", "third"))
        there.end(first)
        with pytest.raises(ConnectionError):
            there.compute.observe(second)
        assert there.phase(third) is Phase.PENDING
        unlucky = ""
        assert there.phase(second) is Phase.RUNNING
        there.end(second)
        assert there.phase(third) is Phase.RUNNING
        there.end(third)


@pytest.mark.parametrize(
    ("settings", "names", "at_once"),
    [
        ({}, ("0", "1"), 2),
        ({"devices": ()}, (), 1),
        ({"devices": [0, 1, "1", " "]}, ("0", "1"), 2),
        ({"devices": ("3",)}, ("3",), 1),
        ({"jobs_at_once": 5}, ("0", "1"), 5),
        ({"jobs_at_once": 5, "max_concurrent_jobs": 3}, ("0", "1"), 3),
    ],
)
def test_gpu_names_and_job_limit_follow_the_settings(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], names: tuple[str, ...], at_once: int
) -> None:
    monkeypatch.setattr(capacity, "installed_gpus", lambda: ["NVIDIA H200", "NVIDIA H200"])
    scheduler = Scheduler(**settings)
    assert (gpu_names(scheduler), max_running_jobs(scheduler)) == (names, at_once)


def test_allowed_gpus_are_read_from_variables_and_settings(tmp_path: Path) -> None:
    home = {"HANZO_ML_HOME": str(tmp_path)}
    assert Settings.load(home).scheduler.devices is None
    assert Settings.load({**home, "CUDA_VISIBLE_DEVICES": "2, GPU-1f"}).scheduler.devices == ("2", "GPU-1f")
    assert Settings.load({**home, "CUDA_VISIBLE_DEVICES": ""}).scheduler.devices == ()
    assert Settings.load({**home, "CUDA_VISIBLE_DEVICES": "-1"}).scheduler.devices == (), "CUDA's word for none"
    assert Settings.load({**home, "CUDA_VISIBLE_DEVICES": "2,-1,3"}).scheduler.devices == ("2",)
    assert Settings.load({**home, "HANZO_ML_SCHEDULER_DEVICES": "0,"}).scheduler.devices == ("0",)
    named = {**home, "CUDA_VISIBLE_DEVICES": "2,3", "HANZO_ML_SCHEDULER_DEVICES": "3"}
    assert Settings.load(named).scheduler.devices == ("3",)
