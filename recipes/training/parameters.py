"""The parameters of a training job."""

from recipes.contracts.frozen_model import FrozenModel
from recipes.contracts.recipe import Recipe
from recipes.contracts.recovery_log import RecoveryEvent
from recipes.contracts.rewind import Rewind


class TrainParameters(FrozenModel):
    """Fine-tune with a recipe. `repeats` is of a replay: what the run that it repeats was healed of.

    `sent_back` is how often, and where to, the run's user sent it back, oldest first.
    """

    recipe: Recipe
    repeats: tuple[RecoveryEvent, ...] = ()
    sent_back: tuple[Rewind, ...] = ()
