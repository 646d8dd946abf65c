"""What a run logs: every number of every step, and how long each checkpoint took."""

import json
import math
from collections import defaultdict
from pathlib import Path

from recipes.training.logged import NAMES
from recipes.training.metrics import PENDING_METRICS
from resources.hpo.refusals import EVALUATED, OF_TEXTS
from tests.recipes.training.place import Place

OF_A_STEP = ("train/loss", "train/grad_norm", "train/learning_rate", "train/tokens_per_second")


def test_every_number_of_every_step_and_every_checkpoint_is_logged(place: Place, tmp_path: Path) -> None:
    """By the last checkpoint, whose own time is not in it yet."""
    place.train(tmp_path / "logged", max_steps=4, eval_steps=None)
    newest = place.checkpoints(tmp_path / "logged").latest()
    assert newest is not None and newest[0] == 4
    steps = defaultdict(list)
    for point in json.loads((newest[1] / PENDING_METRICS).read_text()):
        assert math.isfinite(point["value"]), point
        steps[point["key"]].append(point["step"])
    assert steps == {key: [1, 2, 3, 4] for key in OF_A_STEP} | {"train/checkpoint_seconds": [2]}


def test_a_sweep_may_ask_for_each_number_of_an_evaluation_and_for_no_other() -> None:
    assert {name for name in NAMES.values() if name.startswith("eval/")} | {"eval/perplexity"} == set(EVALUATED)


def test_an_evaluation_is_logged_as_loss_and_perplexity(place: Place, tmp_path: Path) -> None:
    place.train(tmp_path / "evaluated", max_steps=2, eval_steps=1)
    newest = place.checkpoints(tmp_path / "evaluated").latest()
    assert newest is not None and newest[0] == 2
    points = json.loads((newest[1] / PENDING_METRICS).read_text())
    losses, perplexities = (
        {point["step"]: point["value"] for point in points if point["key"] == key}
        for key in ("eval/loss", "eval/perplexity")
    )
    assert sorted(losses) == [1, 2] and perplexities == {step: math.exp(loss) for step, loss in losses.items()}


def test_what_is_learned_from_pairs_has_no_perplexity(place: Place, tmp_path: Path) -> None:
    """Its exponential was logged as one: of a loss that is no cross-entropy, 2 before the first step of dpo."""
    job = place.job(tmp_path / "without-perplexity", {"objective": "dpo", "max_steps": 2, "eval_steps": 1})
    place.run(job.model_copy(update={"inputs": place.pairs}), tmp_path / "without-perplexity")
    newest = place.checkpoints(tmp_path / "without-perplexity").latest()
    assert newest is not None
    logged = {point["key"] for point in json.loads((newest[1] / PENDING_METRICS).read_text())}
    assert {key for key in logged if key.startswith("eval/")} == set(EVALUATED) - set(OF_TEXTS)
