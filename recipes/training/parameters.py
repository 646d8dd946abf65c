"""What the program train is told besides its inputs."""

from recipes.contracts.frozen_model import Frozen
from recipes.contracts.recipe import Recipe
from recipes.contracts.recovery_log import Incident
from recipes.contracts.rewind import SentBack


class TrainParameters(Frozen):
    """Fine-tune with a recipe. `repeats` is of a replay: what the run that it repeats was healed of.

    `sent_back` is how often, and where to, the run's user sent it back, oldest first.
    """

    recipe: Recipe
    repeats: tuple[Incident, ...] = ()
    sent_back: tuple[SentBack, ...] = ()
