"""The learning rate follows its schedule, also in a run that is killed."""

from math import cos, pi
from pathlib import Path

import pytest

from tests.recipes.training.training_workspace import Place, pending_in

RATE, STEPS, WARM = 1e-3, 8, 2
LEFT = {
    "linear": lambda share: 1 - share,
    "cosine": lambda share: (1 + cos(pi * share)) / 2,
    "constant": lambda share: 1.0,
}


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", LEFT)
def test_learning_rate_follows_warmup_and_schedule_across_a_kill(place: Place, tmp_path: Path, scheduler: str) -> None:
    """Compare the logged rate of each step with the formula.

    A second attempt repeats the last steps.
    """
    work = tmp_path / scheduler
    changed = {"lr_scheduler": scheduler, "learning_rate": RATE, "warmup_ratio": WARM / STEPS, "eval_steps": None}
    first = place.train(work, **changed)
    checkpoints = place.checkpoints(work)
    checkpoints.discard_from(6)
    again = place.train(work, **changed)
    assert again.artifacts["adapter"].digest == first.artifacts["adapter"].digest

    pending = pending_in(checkpoints.folder / str(STEPS))
    logged = {point["step"]: point["value"] for point in pending if point["key"] == "train/learning_rate"}
    done = {step: step - 1 for step in logged}  # like transformers: the first warm-up step has rate 0
    expected = {
        step: RATE * (before / WARM if before < WARM else LEFT[scheduler]((before - WARM) / (STEPS - WARM)))
        for step, before in done.items()
    }
    assert logged == pytest.approx(expected) and len(logged) == STEPS
