"""What the program train is told besides its inputs."""

from recipes.frozen import Frozen
from recipes.incidents import Incident
from recipes.recipe import Recipe
from recipes.sent_back import SentBack


class TrainParameters(Frozen):
    """Fine-tune with a recipe. `repeats` is of a replay: what the run that it repeats was healed of.

    `sent_back` is how often, and where to, the run's user sent it back, oldest first.
    """

    recipe: Recipe
    repeats: tuple[Incident, ...] = ()
    sent_back: tuple[SentBack, ...] = ()
