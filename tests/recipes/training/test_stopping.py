"""A stop request is noticed at any time, and waits for one micro-batch at most."""

import math
import os
import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from recipes import train as program
from recipes.contracts.divergence import DivergencePolicy
from recipes.runner import Preempted
from recipes.training.divergence import Divergence, StopOnDivergence
from recipes.training.parallel.process_group import ProcessGroup
from recipes.training.stopping import StopOnSignal
from tests.recipes.training.training_workspace import Place, facts


class SignalledAsTheyTell(ProcessGroup):
    """A single process that receives SIGTERM right after reporting that it has none."""

    def any(self, flag: bool) -> bool:
        result = super().any(flag)
        os.kill(os.getpid(), signal.SIGTERM)
        return result


@pytest.fixture
def own_handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("own_handler")
def test_stop_signal_during_process_exchange_is_not_lost() -> None:
    stop = StopOnSignal(SignalledAsTheyTell(), saves=True)
    control = TrainerControl()
    arguments = TrainingArguments(report_to=[])
    stop.on_train_begin(arguments, TrainerState(), control)
    state = TrainerState(global_step=1)
    assert not stop.on_step_end(arguments, state, control).should_training_stop
    assert stop.is_requested
    control = stop.on_step_end(arguments, state, control)
    assert control.should_training_stop
    assert control.should_save


def test_divergence_is_final_and_suppresses_a_due_checkpoint() -> None:
    """A program killed before the checkpoint is discarded would resume from it."""
    stop, arguments = StopOnDivergence(DivergencePolicy()), TrainingArguments(report_to=[])
    for step, loss in ((3, math.nan), (4, 1.0)):
        control = TrainerControl(should_save=True, should_evaluate=True)
        stop.on_log(arguments, TrainerState(global_step=step), control, {"loss": loss})
        assert stop.detected == Divergence(3, 3, "the loss of step 3 is nan")
        assert control.should_training_stop and not control.should_save and not control.should_evaluate


def test_resumed_run_detects_divergence_like_an_uninterrupted_one() -> None:
    stop, arguments = StopOnDivergence(DivergencePolicy()), TrainingArguments(report_to=[])
    history: list[Any] = [{"step": step, "loss": 2.0 if step < 31 else 100.0} for step in range(1, 41)]
    stop.on_train_begin(arguments, TrainerState(log_history=[*history, {"step": 40, "eval_loss": 9.0}]), TrainerControl())
    assert stop.doubted_since == 31
    for step in range(41, 51):
        assert stop.detected is None
        stop.on_log(arguments, TrainerState(global_step=step), TrainerControl(), {"loss": 100.0})
    assert stop.detected is not None and (stop.detected.first, stop.detected.noticed) == (31, 50)


class MicroBatches:
    """Counts training micro-batches; SIGTERM arrives in number `stop_in`."""

    def __init__(self) -> None:
        self.begun = 0
        self.stop_in = 0

    def begin(self, module: torch.nn.Module, given: Any) -> None:
        self.begun += module.training
        if module.training and self.begun == self.stop_in:
            os.kill(os.getpid(), signal.SIGTERM)

    def draw(self, module: torch.nn.Module, given: Any, output: Any) -> Any:
        """Draw from the random sources that dropout does not use."""
        if module.training:
            output.loss = output.loss * (1 + random.random() / 10 + np.random.random() / 10)
        return output


@pytest.fixture
def micro_batches(monkeypatch: pytest.MonkeyPatch) -> MicroBatches:
    load = program.load_model
    seen = MicroBatches()

    def watched(*given: Any) -> Any:
        model = load(*given)
        model.register_forward_pre_hook(seen.begin)
        model.register_forward_hook(seen.draw)
        return model

    monkeypatch.setattr(program, "load_model", watched)
    return seen


@pytest.mark.parametrize(
    ("saves", "accumulation", "stop_in", "kept", "saying"),
    [
        (True, 1, 3, [3, 2], "^checkpoint 3 holds everything$"),
        (False, 1, 2, [2], "^checkpoint 2 holds everything$"),  # a checkpoint that is due is saved anyway
        (False, 1, 3, [2], "^stopped after step 3: resumes from checkpoint 2$"),
        (False, 4, 15, [2], "^stopped after step 3: resumes from checkpoint 2$"),
    ],
)
def test_stopped_run_saves_a_checkpoint_according_to_policy(
    place: Place,
    tmp_path: Path,
    micro_batches: MicroBatches,
    saves: bool,
    accumulation: int,
    stop_in: int,
    kept: list[int],
    saying: str,
) -> None:
    micro_batches.stop_in = stop_in
    policy = {"interval": "1h", "interval_steps": 2, "save_on_preempt": saves}
    work = tmp_path / f"saves-{saves}-{accumulation}-{stop_in}"
    parts = {"batch_size": 4 // accumulation, "gradient_accumulation": accumulation}
    with pytest.raises(Preempted, match=saying):
        place.train(work, eval_steps=None, checkpoint=policy, **parts)
    assert place.checkpoints(work).local_steps() == kept
    assert micro_batches.begun == stop_in


ACCUMULATING = {"batch_size": 1, "gradient_accumulation": 4, "max_steps": 3, "eval_steps": None, "lora_dropout": 0.1}
STOPS = [
    (3, [], "^stopped after step 0: resumes from the beginning$"),
    (6, ["1"], "^checkpoint 1 holds everything$"),
    (1, [], "^checkpoint 1 holds everything$"),
    (7, ["2"], "^checkpoint 2 holds everything$"),
]
"""Per start: micro-batch of the SIGTERM, checkpoints saved, and the reported resume point."""


@pytest.mark.slow
def test_interrupted_step_is_repeated_bit_for_bit_on_resume(
    place: Place, tmp_path: Path, micro_batches: MicroBatches, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run draws from every random source.

    Some stops save a checkpoint, others resume from an earlier one.
    """
    whole = place.train(tmp_path / "undisturbed-steps", **ACCUMULATING)
    assert micro_batches.begun == 12
    capsys.readouterr()
    for stop_in, saves, saying in STOPS:
        micro_batches.begun, micro_batches.stop_in = 0, stop_in
        with pytest.raises(Preempted, match=saying):
            place.train(tmp_path / "broken-off-steps", **ACCUMULATING)
        assert micro_batches.begun == stop_in
        assert re.findall(r"checkpoint (\d+) saved", capsys.readouterr().out) == saves
    micro_batches.begun, micro_batches.stop_in = 0, 0
    result = place.train(tmp_path / "broken-off-steps", **ACCUMULATING)
    assert micro_batches.begun == 4
    assert facts(result).losses == facts(whole).losses
    assert result.artifacts["adapter"].digest == whole.artifacts["adapter"].digest
