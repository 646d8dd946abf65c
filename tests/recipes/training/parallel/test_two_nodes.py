"""Training on two nodes, started like pods: shared store and network, but no shared folder."""

import signal
from pathlib import Path
from typing import Any

import pytest

from recipes.contracts.results import TrainingFacts
from tests.recipes.training.forked_processes import Forks
from tests.recipes.training.simulated_pods import NODES, Gang
from tests.recipes.training.training_workspace import Place
from tests.support.recipes.two_node_training import FULL, STEPS, job_of, losses_of, result_of
from tests.support.server_process import ServerProcess

pytestmark = pytest.mark.slow


@pytest.mark.requirement("H2", "H8", "I3")
@pytest.mark.parametrize(
    ("strategy", "method"),
    [
        ("fsdp", FULL),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in (("ddp", {}), ("deepspeed_zero2", {}), ("deepspeed_zero3", FULL))
        ),
    ],
)
def test_run_on_two_nodes_survives_a_lost_node_and_a_preemption_bit_for_bit(
    place: Place, server: ServerProcess, started: Forks, tmp_path: Path, strategy: str, method: dict[str, Any]
) -> None:
    """The result is bit-identical to that of as many processes on one undisturbed node."""
    whole = started.train(job_of(place, server, tmp_path / f"node-{strategy}", 1, strategy, **method))
    job = job_of(place, server, tmp_path / f"nodes-{strategy}-lost", NODES, strategy, **method)
    gang = Gang(job, tmp_path / "lost")
    gang.until(4)
    gang.kill(1)
    codes = gang.wait()
    assert codes[0] not in (0, 78), gang.said()

    gang = Gang(job, tmp_path / "preempted")
    gang.until(16)
    for node in gang.nodes:
        node.send_signal(signal.SIGTERM)
    assert gang.wait() == [143, 143], gang.said()

    gang = Gang(job, tmp_path / "last")
    assert gang.wait() == [0, 0], gang.said()
    result = result_of(place, job)
    assert 16 <= (TrainingFacts.model_validate(result.facts).resumed_from or 0) < STEPS
    assert losses_of(result) == losses_of(whole)
    assert {role: made.digest for role, made in result.artifacts.items()} == {
        role: made.digest for role, made in whole.artifacts.items()
    }


@pytest.mark.parametrize(("strategy", "method"), [("ddp", {}), pytest.param("fsdp", FULL, marks=pytest.mark.long)])
def test_nodes_keeping_their_folders_resume_from_one_checkpoint(
    place: Place, server: ServerProcess, started: Forks, tmp_path: Path, strategy: str, method: dict[str, Any]
) -> None:
    """All processes are killed while the newest checkpoint is being uploaded.

    It is whole on the first machine, or in parts on both.
    """
    whole = started.train(job_of(place, server, tmp_path / f"node-{strategy}", 1, strategy, **method))
    job = job_of(place, server, tmp_path / f"nodes-{strategy}", NODES, strategy, **method)
    gang = Gang(job, tmp_path / "machines")
    gang.until(16)
    gang.kill(0, 1)
    gang.wait()
    folders = [tmp_path / "machines" / str(node) / "work" / "checkpoints" for node in range(NODES)]
    saved = [{int(path.name) for path in folder.glob("[0-9]*")} for folder in folders]
    newest = max(saved[0] if strategy == "ddp" else saved[0] & saved[1])
    for step in range(newest, STEPS):
        place.store.delete(f"{job.outputs['checkpoints']}/{step}")
    earlier = tmp_path / "machines" / "1" / "work" / "checkpoints" / "2"
    earlier.mkdir(parents=True, exist_ok=True)

    gang = Gang(job, tmp_path / "machines")
    assert gang.wait() == [0, 0], gang.said()
    result = result_of(place, job)
    assert TrainingFacts.model_validate(result.facts).resumed_from == newest
    assert not earlier.exists(), "what was fetched for an earlier start fills the disk"
    assert losses_of(result) == losses_of(whole)
    assert {role: made.digest for role, made in result.artifacts.items()} == {
        role: made.digest for role, made in whole.artifacts.items()
    }


@pytest.mark.long
def test_sharded_checkpoint_resumes_on_another_process_count(
    place: Place, server: ServerProcess, started: Forks, tmp_path: Path
) -> None:
    """Two processes on two nodes, then four on new machines.

    Each node fetches only one of the two shard files.
    """
    whole = started.train(job_of(place, server, tmp_path / "node", 1, "fsdp", **FULL))
    job = job_of(place, server, tmp_path / "nodes", NODES, "fsdp", **FULL)
    job = job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update={"keep_last": STEPS})})
    gang = Gang(job, tmp_path / "two")
    gang.until(16)
    for node in gang.nodes:
        node.send_signal(signal.SIGTERM)
    assert gang.wait() == [143, 143], gang.said()

    assert job.distributed
    more = job.distributed.model_copy(update={"gpus_per_node": 2})
    gang = Gang(job.model_copy(update={"distributed": more}), tmp_path / "four")
    assert gang.wait() == [0, 0], gang.said()
    result = result_of(place, job)
    resumed = TrainingFacts.model_validate(result.facts).resumed_from
    assert resumed and resumed >= 16
    for node in range(NODES):
        folder = tmp_path / "four" / str(node) / "work" / "checkpoints" / str(resumed)
        assert {file.name for file in folder.glob("*-rows-*")} == {
            f"{stem}-rows-0000{node + 1}-of-00002.safetensors" for stem in ("model", "optimizer")
        }
    losses, expected = losses_of(result), losses_of(whole)
    assert losses.keys() == expected.keys()
    assert {step: losses[step] for step in range(1, resumed)} == {step: expected[step] for step in range(1, resumed)}
    for step in range(resumed, STEPS + 1):
        assert losses[step] == pytest.approx(expected[step], rel=1e-3)
