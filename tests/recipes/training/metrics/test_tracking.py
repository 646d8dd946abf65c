"""What a run logs: the metrics of every step, and the duration of each checkpoint."""

import math
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerState

from recipes.training.metrics.tracking import TrackingCallback
from resources.hpo.sweep_validation import EVALUATION_METRICS, PREFERENCE_METRICS, TEXT_METRICS
from tests.recipes.training.training_workspace import Place, pending_in

OF_A_STEP = ("train/loss", "train/grad_norm", "train/learning_rate", "train/tokens_per_second")


@pytest.mark.requirement("E3", "Y1")
def test_every_number_of_every_step_and_every_checkpoint_is_logged(place: Place, tmp_path: Path) -> None:
    """The last checkpoint holds all points but its own duration."""
    place.train(tmp_path / "logged", max_steps=4, eval_steps=None)
    newest = place.checkpoints(tmp_path / "logged").latest()
    assert newest is not None and newest[0] == 4
    steps = defaultdict(list)
    for point in pending_in(newest[1]):
        assert math.isfinite(point["value"]), point
        steps[point["key"]].append(point["step"])
    assert steps == {key: [1, 2, 3, 4] for key in OF_A_STEP} | {"train/checkpoint_seconds": [2]}


def test_step_time_excludes_evaluation_and_checkpointing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step has 100 tokens and takes 2 s; phases in between take 10 s."""
    now, calls = [0.0], list[tuple[int, float]]()
    monkeypatch.setattr("recipes.training.metrics.tracking.time.monotonic", lambda: now[0])
    work: Any = SimpleNamespace(throughput_metrics=lambda tokens, seconds: calls.append((tokens, seconds)) or {})
    meter, metrics = SimpleNamespace(last_stall_seconds=None), SimpleNamespace(add=lambda *point: None)
    log, state = TrackingCallback(metrics, work, meter, has_perplexity=False), TrainerState(max_steps=4)
    state.num_input_tokens_seen = 700  # of the steps before the checkpoint it resumes from
    for between in (log.on_train_begin, log.on_evaluate, log.on_save, None):
        if between:
            now[0] += 10
            between(None, state, None)
        now[0] += 2
        state.num_input_tokens_seen += 100
        log.on_log(None, state, None, {"loss": 1.0})
    assert calls == [(100, 2.0)] * 4


def test_an_evaluation_is_logged_as_loss_and_perplexity(place: Place, tmp_path: Path) -> None:
    place.train(tmp_path / "evaluated", max_steps=2, eval_steps=1)
    newest = place.checkpoints(tmp_path / "evaluated").latest()
    assert newest is not None and newest[0] == 2
    points = pending_in(newest[1])
    keys = {point["key"] for point in points if point["key"].startswith("eval/")}
    assert keys == set(EVALUATION_METRICS) - set(PREFERENCE_METRICS)  # the metrics that a sweep can optimize
    losses, perplexities = (
        {point["step"]: point["value"] for point in points if point["key"] == key}
        for key in ("eval/loss", "eval/perplexity")
    )
    assert sorted(losses) == [1, 2] and perplexities == {step: math.exp(loss) for step, loss in losses.items()}


def test_preference_training_logs_no_perplexity(place: Place, tmp_path: Path) -> None:
    """Perplexity is the exponential of a cross-entropy, which a preference loss is not.

    It used to be logged anyway: 2 before the first step of DPO.
    """
    job = place.job(tmp_path / "without-perplexity", {"objective": "dpo", "max_steps": 2, "eval_steps": 1})
    place.run(job.model_copy(update={"inputs": place.pairs}), tmp_path / "without-perplexity")
    newest = place.checkpoints(tmp_path / "without-perplexity").latest()
    assert newest is not None
    logged = {point["key"] for point in pending_in(newest[1])}
    assert {key for key in logged if key.startswith("eval/")} == set(EVALUATION_METRICS) - set(TEXT_METRICS)
