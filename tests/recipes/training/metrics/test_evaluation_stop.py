"""SIGTERM during an evaluation: it stops at once, and is repeated first on resume."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from recipes.contracts.results import TrainingFacts
from recipes.runner import Preempted
from recipes.training.metrics.microbatch_metrics import MicrobatchMetrics
from recipes.training.metrics.validation_loss import is_evaluation_due
from recipes.training.objective_trainer import ObjectiveTrainer
from tests.recipes.training.training_workspace import Place, pending_in

PARTS = 8
"""Micro-batches of an evaluation at micro-batch size 1."""
FIRST_IS_BEST = {
    "batch_size": 1,
    "gradient_accumulation": 4,
    "max_steps": 4,
    "eval_steps": 2,
    "publish": "best",
    "learning_rate": 1e-15,  # too small to change float32 weights: of equal losses the first is the best
    "checkpoint": {"interval": "1h", "interval_steps": 100, "keep_last": 1},
}


class Evaluated:
    """Records the size of each evaluated micro-batch; SIGTERM arrives during number `stop_in`."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.stop_in = 0


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> Evaluated:
    seen = Evaluated()
    part = ObjectiveTrainer._evaluate_batch

    def watched(trainer: ObjectiveTrainer, rows: range) -> MicrobatchMetrics:
        seen.sizes.append(len(rows))
        if len(seen.sizes) == seen.stop_in:
            os.kill(os.getpid(), signal.SIGTERM)
        return part(trainer, rows)

    monkeypatch.setattr(ObjectiveTrainer, "_evaluate_batch", watched)
    return seen


def logged(place: Place, work: Path) -> list[tuple[str, int, float]]:
    """Return all points logged up to the newest checkpoint, except timings."""
    newest = place.checkpoints(work).latest()
    assert newest is not None
    points: list[dict[str, Any]] = pending_in(newest[1])
    of_time = ("train/tokens_per_second", "train/checkpoint_seconds")
    return [(point["key"], point["step"], point["value"]) for point in points if point["key"] not in of_time]


@pytest.mark.slow
def test_interrupted_evaluation_is_repeated_first_on_resume(place: Place, tmp_path: Path, evaluated: Evaluated) -> None:
    work = tmp_path / "stopped"
    whole = place.train(tmp_path / "whole", **FIRST_IS_BEST)
    assert evaluated.sizes == [1] * 2 * PARTS

    def stopped_in(part: int, saying: str) -> None:
        """Train until SIGTERM in that micro-batch, and assert that the evaluation stops there."""
        evaluated.sizes.clear()
        evaluated.stop_in = part
        with pytest.raises(Preempted, match=saying):
            place.train(work, **FIRST_IS_BEST)
        assert len(evaluated.sizes) == part

    stopped_in(2, "^checkpoint 2 holds everything$")
    assert place.checkpoints(work).best() is None
    stopped_in(3, "^checkpoint 2 holds everything but its evaluation$")
    stopped_in(PARTS + 3, "^checkpoint 4 holds everything$")
    evaluated.sizes.clear()
    evaluated.stop_in = 0
    result = place.train(work, **FIRST_IS_BEST)
    assert len(evaluated.sizes) == PARTS

    found, expected = (TrainingFacts.model_validate(each.facts) for each in (result, whole))
    assert found.resumed_from == 4
    assert (found.best_step, found.published_step) == (expected.best_step, expected.published_step) == (2, 2)
    assert found.losses == expected.losses
    assert result.artifacts["adapter"].digest == whole.artifacts["adapter"].digest
    last = [("eval/loss", 4), ("eval/perplexity", 4)]  # its checkpoint was saved before this evaluation
    assert logged(place, work) == [point for point in logged(place, tmp_path / "whole") if point[:2] not in last]


def test_interrupted_evaluation_saves_no_checkpoint_without_save_on_preempt(
    place: Place, tmp_path: Path, evaluated: Evaluated
) -> None:
    evaluated.stop_in = 2
    policy = {**FIRST_IS_BEST["checkpoint"], "save_on_preempt": False}
    with pytest.raises(Preempted, match=r"^stopped after step 2: resumes from the beginning$"):
        place.train(tmp_path / "unsaved", **FIRST_IS_BEST | {"checkpoint": policy})
    assert len(evaluated.sizes) == 2
    assert place.checkpoints(tmp_path / "unsaved").local_steps() == []


def test_evaluation_is_due_until_logged() -> None:
    history = [{"step": 2, "eval_loss": 1.5}, {"step": 4, "loss": 2.0}]
    assert [step for step in range(7) if is_evaluation_due(step, 2, 7, history)] == [4, 6]
    assert not is_evaluation_due(4, None, 4, history)


@pytest.mark.slow
def test_evaluation_is_due_after_the_last_step(place: Place, tmp_path: Path, evaluated: Evaluated) -> None:
    """A SIGTERM in the last step used to skip its evaluation.

    The best checkpoint was then missed if it was the last one.
    """
    recipe = FIRST_IS_BEST | {"max_steps": 3, "learning_rate": 0.001}
    whole = place.train(tmp_path / "uneven", **recipe)
    evaluated.sizes.clear()
    evaluated.stop_in = PARTS + 3
    with pytest.raises(Preempted, match=r"^checkpoint 3 holds everything$"):
        place.train(tmp_path / "uneven and stopped", **recipe)
    evaluated.stop_in = 0
    result = place.train(tmp_path / "uneven and stopped", **recipe)
    found, expected = (TrainingFacts.model_validate(each.facts) for each in (result, whole))
    assert found.resumed_from == 3
    assert (found.best_step, found.published_step) == (expected.best_step, expected.published_step)
    assert expected.best_step == 3
    assert result.artifacts["adapter"].digest == whole.artifacts["adapter"].digest
