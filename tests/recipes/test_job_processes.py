"""Which processes are a job's, and which of them are ended."""

import os
import subprocess
from uuid import uuid4

from recipes.job_processes import MARK, NODE, end_processes, processes


def test_a_node_ends_its_own_processes_and_leaves_another_s() -> None:
    """On one machine, the first that was over ended the command of the second, which then had to start again."""
    job = uuid4().hex
    sleeping = [
        subprocess.Popen(["sleep", "600"], env={**os.environ, MARK: job, NODE: node}, start_new_session=True)
        for node in ("0", "1", "10")
    ]
    try:
        assert end_processes(job, "1") == 1
        assert sleeping[1].wait(60) == -9
        assert set(processes(job)) == {sleeping[0].pid, sleeping[2].pid}
        assert end_processes(job) == 2
        assert [process.wait(60) for process in sleeping] == [-9, -9, -9]
    finally:
        for process in sleeping:
            process.kill()
