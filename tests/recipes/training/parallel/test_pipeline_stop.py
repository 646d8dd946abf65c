"""A pipeline run is stopped in the middle of a step.

No stage computes the rest of it, and the resumed run repeats the step from its first row.
"""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes import train as program
from recipes.contracts.job import EXIT_PREEMPTED, Job
from recipes.training.parallel.pipeline_stage import causal_model
from tests.recipes.training.forked_processes import Forks, begin, log_of
from tests.recipes.training.parallel_strategies import shape
from tests.recipes.training.tracked_runs import LONG
from tests.recipes.training.training_workspace import Place, facts
from tests.support.free_ports import free_port
from tests.support.recipes.deep_model import deeper

__all__ = ["deeper"]  # a fixture
pytestmark = pytest.mark.slow

ADAPTER = {"lora_dropout": 0.1}
FULL = {"method": "full", "dtype": "float32", "learning_rate": 1e-3}


def begin_asked(asked: int, micro_batch: int, described: str, rank: int, size: int, port: int) -> None:
    """Like `begin`, but send SIGTERM to one rank in one micro-batch.

    Each rank records how many micro-batches it began.
    """
    load = vars(program)["load_model"]
    begun = 0

    def count(module: torch.nn.Module, given: Any) -> None:
        nonlocal begun
        begun += module.training
        begun_by(Path(Job.model_validate_json(described).work_dir), rank).write_text(str(begun))
        if rank == asked and begun == micro_batch and module.training:
            os.kill(os.getpid(), signal.SIGTERM)

    def counted(*given: Any) -> Any:
        model = load(*given)
        causal_model(model).model.register_forward_pre_hook(count)
        return model

    pytest.MonkeyPatch().setattr(program, "load_model", counted)  # never undone: the process ends
    begin(described, rank, size, port)


def begun_by(work: Path, rank: int) -> Path:
    return work / f"begun-{rank}"


def train_asked(started: Forks, job: Job, stages: int, asked: int, micro_batch: int) -> Sequence[int | None]:
    """Return the exit codes by rank."""
    Path(job.work_dir).mkdir(parents=True)
    port, described = free_port(), job.model_dump_json()
    processes = [
        started._context.Process(target=begin_asked, args=(asked, micro_batch, described, rank, stages, port))
        for rank in range(stages)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LONG)
    return [process.exitcode for process in processes]


@pytest.mark.parametrize(
    ("stages", "times", "asked", "method"),
    [
        pytest.param(2, 8, 0, ADAPTER, marks=pytest.mark.long),
        (2, 8, 1, FULL),
        pytest.param(3, 8, 1, FULL, marks=pytest.mark.long),
        (3, 2, 2, ADAPTER),
    ],
    ids=["first", "last-of-tied", "middle", "all-forwards-first"],
)
def test_interrupted_step_stops_all_stages_and_is_repeated_on_resume(
    place: Place,
    started: Forks,
    deeper: dict[str, Any],
    tmp_path: Path,
    stages: int,
    times: int,
    asked: int,
    method: dict[str, Any],
) -> None:
    settings = {"batch_size": 1, "gradient_accumulation": times, "max_steps": 7, "eval_steps": 3, **method}
    settings |= {"distributed": shape("pipeline", stages), **(deeper if stages > 2 else {})}
    works = [tmp_path / f"{tmp_path.name}-{name}" for name in ("whole", "stopped")]
    whole, job = (
        place.job(work, settings).model_copy(update={"distributed": place.recipe.changed(settings).distributed})
        for work in works
    )
    expected = started.train(whole)
    stop_in = 5 * times + 1 + times // 4  # in the sixth step: the third micro-batch of 8, or the first of 2
    codes = train_asked(started, job, stages, asked, stop_in)
    log = log_of(job).read_text()
    assert codes[0] == EXIT_PREEMPTED and None not in codes, log
    assert "stop requested: step 6 aborted: saving a checkpoint first" in log
    assert int(begun_by(works[1], asked).read_text()) == stop_in, "nothing was computed after it"
    assert place.checkpoints(works[1]).local_steps()[0] == 5
    Path(job.work_dir, "exit.json").unlink()
    result = started.train(job)
    assert facts(result).resumed_from == 5
    assert facts(result).losses == facts(expected).losses
    digests = [{role: made.digest for role, made in of.artifacts.items()} for of in (result, expected)]
    assert digests[0] == digests[1]
