"""Training by a gang of launchers, as on a cluster.

Killed, stopped and resumed, it computes what one node computes.
"""

import os
import re
import signal
from pathlib import Path

import pytest

from recipes.contracts.exit_reason import ExitReason
from recipes.contracts.job import Tracking
from recipes.contracts.results import TrainingFacts
from recipes.launch.child_process import descendants
from tests.recipes.launch.launched_gang import LONG, ClusterJob, LaunchedGang
from tests.recipes.training.forked_processes import Forks
from tests.recipes.training.simulated_pods import NODES
from tests.recipes.training.training_workspace import Place
from tests.support.recipes.two_node_training import FULL, STEPS, job_of, losses_of, result_of
from tests.support.server_process import ServerProcess

pytestmark = pytest.mark.slow


def wait_for_step(gang: LaunchedGang, step: int) -> None:
    gang.wait_for(lambda: any(int(found) >= step for found in re.findall(r" step (\d+)/\d+ loss ", gang.output(0))))


def ranks(launcher: int) -> list[int]:
    """Return the training processes of a launcher, without torchrun."""
    return [pid for pid in descendants(launcher) if b"recipes.torchrun" not in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_gang_resumes_after_kill_and_preemption_bit_for_bit(
    place: Place, server: ServerProcess, started: Forks, tmp_path: Path
) -> None:
    whole = started.train(job_of(place, server, tmp_path / "launched-whole", 1, "fsdp", **FULL))
    job = job_of(place, server, tmp_path / "launched-gang", NODES, "fsdp", **FULL)
    job = job.model_copy(update={"tracking": Tracking(uri=server.url, run_id=job.id)})
    cluster_job = ClusterJob(job, server)
    gangs: list[LaunchedGang] = []

    def launch() -> LaunchedGang:
        gangs.append(LaunchedGang(cluster_job, tmp_path / f"gang-{len(gangs)}", nodes=NODES, processes=1))
        return gangs[-1]

    try:
        gang = launch()
        wait_for_step(gang, 4)
        os.kill(ranks(gang.pods[1].pid)[0], signal.SIGKILL)
        assert gang.wait() == [75, 75], gang.describe()

        gang = launch()
        wait_for_step(gang, 12)
        gang.freeze(0)
        assert gang.pods[1].wait(LONG) == 75, gang.describe()
        assert "most recent call first" in gang.output(1), "no stacks of the rank that waited in a collective"
        gang.kill_all()

        gang = launch()
        wait_for_step(gang, 20)
        gang.pods[1].send_signal(signal.SIGTERM)
        assert gang.wait() == [143, 143], gang.describe()

        gang = launch()
        assert gang.wait() == [0, 0], gang.describe()
    finally:
        for gang in gangs:
            gang.kill_all()

    assert [attempt.reason for attempt in cluster_job.attempts()] == [
        ExitReason.KILLED,
        ExitReason.NODE_LOST,
        ExitReason.PREEMPTED,
        ExitReason.COMPLETED,
    ]
    result = result_of(place, job)
    assert 20 <= (TrainingFacts.model_validate(result.facts).resumed_from or 0) < STEPS
    assert losses_of(result) == losses_of(whole)
    assert {role: made.digest for role, made in result.artifacts.items()} == {
        role: made.digest for role, made in whole.artifacts.items()
    }
    assert " step 40/40 loss " in cluster_job.log(4)
