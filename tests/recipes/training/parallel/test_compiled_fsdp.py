"""Compiled blocks with FSDP2-sharded weights on two processes.

Uses only the compiler's first stage, which needs no GPU and rounds like uncompiled code.
"""

import random
from pathlib import Path
from typing import Any

import pytest

from recipes.planning.parallel_layout import computes_whole_blocks
from recipes.storage.artifact_store import MANIFEST_FILE
from recipes.storage.manifest import Manifest
from recipes.training.checkpointing.resume_point import COMPILED_FACT
from tests.recipes.training.forked_processes import Forks
from tests.recipes.training.parallel_strategies import shape
from tests.recipes.training.tracked_runs import install
from tests.recipes.training.training_workspace import Place, facts

FULL = {"method": "full", "dtype": "float32", "learning_rate": 1e-3}
COMPILING = """
from peft import PeftModel
from recipes.training.objectives.sft import Sft

class Compiling(Sft):
    def begin(self, model):
        base = model.get_base_model() if isinstance(model, PeftModel) else model
        for block in base.get_decoder().layers:
            block.compile(dynamic=False, backend="aot_eager", fullgraph=True)
"""


@pytest.mark.parametrize(
    ("strategy", "processes", "expected"),
    [
        ("ddp", 2, True),
        ("fsdp", 1, True),
        ("fsdp", 2, True),
        ("tensor", 2, False),
        ("hybrid", 2, False),
        ("pipeline", 1, True),
        ("pipeline", 2, False),
        ("deepspeed_zero2", 2, False),
        ("deepspeed_zero3", 2, False),
    ],
)
def test_blocks_are_computed_whole_unless_sharded(place: Place, strategy: str, processes: int, expected: bool) -> None:
    recipe = place.recipe.changed({**FULL, "distributed": shape(strategy, processes)})
    assert computes_whole_blocks(recipe) is expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [pytest.param({}, marks=pytest.mark.long), FULL | {"gradient_checkpointing": True}], ids=["lora", "full"]
)
def test_compiled_fsdp_matches_uncompiled_and_resumes_after_a_kill(
    place: Place, started: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: dict[str, Any]
) -> None:
    install("compiling", COMPILING, tmp_path, monkeypatch)
    settings = {"batch_size": 2, "max_steps": 12, "eval_steps": 4, "distributed": shape("fsdp", 2), **method}
    plain, job = (
        place.job(tmp_path / name, {**settings, "objective": objective}).model_copy(
            update={"distributed": place.recipe.changed(settings).distributed}
        )
        for name, objective in ((f"plain-{tmp_path.name}", "sft"), (f"compiled-{tmp_path.name}", "compiling"))
    )
    whole = started.train(plain)
    started.kill(job, 2, random.Random(0))
    result = started.train(job)
    assert facts(result).resumed_from
    newest = Path(job.work_dir, "checkpoints", "12", MANIFEST_FILE)
    assert Manifest.model_validate_json(newest.read_bytes()).facts[COMPILED_FACT] is True
    assert facts(result).losses == facts(whole).losses
    assert {role: made.digest for role, made in result.artifacts.items()} == {
        role: made.digest for role, made in whole.artifacts.items()
    }
