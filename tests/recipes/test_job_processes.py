"""Finding and killing the processes of a job."""

import os
import signal
import subprocess
from uuid import uuid4

import pytest

from recipes import job_processes
from recipes.job_processes import JOB_ID_VARIABLE, NODE_RANK_VARIABLE, find_job_processes, kill_job_processes


def test_node_kills_only_its_own_processes() -> None:
    """Regression: on one machine, the first finished node killed the second node's command."""
    job = uuid4().hex
    sleeping = [
        subprocess.Popen(
            ["sleep", "600"], env={**os.environ, JOB_ID_VARIABLE: job, NODE_RANK_VARIABLE: node}, start_new_session=True
        )
        for node in ("0", "1", "10")
    ]
    try:
        assert kill_job_processes(job, "1") == 1
        assert sleeping[1].wait(60) == -9
        assert set(find_job_processes(job)) == {sleeping[0].pid, sleeping[2].pid}
        assert kill_job_processes(job) == 2
        assert [process.wait(60) for process in sleeping] == [-9, -9, -9]
    finally:
        for process in sleeping:
            process.kill()


def test_unkillable_process_does_not_block_killing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the killer waited forever for it, which kept the job and its GPUs."""
    looks = iter(range(100))

    def waits_for_a_server(*_: object) -> None:
        assert next(looks, None) is not None, "it is still waited for"

    monkeypatch.setattr(job_processes, "KILL_TIMEOUT_SECONDS", 0.1)
    monkeypatch.setattr(signal, "pidfd_send_signal", waits_for_a_server)
    job = uuid4().hex
    with subprocess.Popen(["sleep", "600"], env={**os.environ, JOB_ID_VARIABLE: job}) as sleeping:
        try:
            assert kill_job_processes(job) == 1
            assert find_job_processes(job) == [sleeping.pid]
        finally:
            sleeping.kill()
