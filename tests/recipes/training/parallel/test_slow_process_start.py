"""A process that loads its model later than the others."""

from pathlib import Path

import pytest

from tests.recipes.training.forked_processes import Forks, log_of
from tests.recipes.training.parallel_strategies import shape
from tests.recipes.training.tracked_runs import install
from tests.recipes.training.training_workspace import Place

LATE = """
import time
import torch.distributed as dist
from recipes.runner import log_line
from recipes.training.objectives.sft import Sft

class Late(Sft):
    def begin(self, model):
        if dist.get_rank() == 1:
            time.sleep(3)
        log_line(f"process {dist.get_rank()} has its model")
"""


@pytest.mark.slow
def test_training_starts_only_after_all_processes_loaded_the_model(
    place: Place, started: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait for it with a timeout of two hours.

    In an NCCL collective they would give up after ten minutes.
    """
    install("late", LATE, tmp_path, monkeypatch)
    changed = {"objective": "late", "batch_size": 2, "max_steps": 1, "eval_steps": None, "distributed": shape("ddp", 2)}
    distributed = place.recipe.changed(changed).distributed
    job = place.job(tmp_path / "late", changed).model_copy(update={"distributed": distributed})
    started.train(job)
    said = log_of(job).read_text()
    assert max(said.index(f"process {rank} has its model") for rank in "01") < said.index("starting 1 step"), said
