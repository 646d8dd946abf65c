"""A trainer as `recipes.train` makes it for attention without a mask."""

from pathlib import Path
from typing import Any

import pytest

from recipes import train as program
from recipes.training import packed_attention
from recipes.training.objective_trainer import ObjectiveTrainer
from tests.recipes.training.training_workspace import Place


class Caught(Exception):
    """Stop before anything is trained."""


def trainer_of(place: Place, work: Path, **changed: Any) -> ObjectiveTrainer:
    """Build the trainer as the program does if attention needs no mask."""
    made: list[ObjectiveTrainer] = []

    def caught(trainer: ObjectiveTrainer, *_: Any) -> None:
        made.append(trainer)
        raise Caught

    with pytest.MonkeyPatch.context() as patched, pytest.raises(Caught):
        patched.setattr(packed_attention, "supports_packed_attention", lambda *_: True)
        patched.setattr(program, "run_training", caught)
        place.train(work, **changed)
    return made[0]
