"""A run that is asked to stop hears of it, whenever the signal comes."""

import os
import signal
from collections.abc import Iterator

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from recipes.training.group import Group
from recipes.training.stopping import StopOnSignal


class SignalledAsTheyTell(Group):
    """One process, which gets the signal just after it has told the others that it has none."""

    def any(self, flag: bool) -> bool:
        told = super().any(flag)
        os.kill(os.getpid(), signal.SIGTERM)
        return told


@pytest.fixture
def own_handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("own_handler")
def test_a_signal_that_comes_while_the_processes_tell_each_other_is_not_lost() -> None:
    stop = StopOnSignal(SignalledAsTheyTell())
    state, control = TrainerState(), TrainerControl()
    arguments = TrainingArguments(report_to=[])
    stop.on_train_begin(arguments, state, control)
    assert not stop.on_step_end(arguments, state, control).should_training_stop
    assert stop.requested
    control = stop.on_step_end(arguments, state, control)
    assert control.should_training_stop
    assert control.should_save
