"""What the program train is told besides its inputs."""

from recipes.incidents import OutOfMemory
from recipes.recipe import Recipe
from recipes.schema import Frozen


class TrainParameters(Frozen):
    """Fine-tune with a recipe. `repeats` is of a replay: where the run that it repeats went on in smaller micro-batches."""

    recipe: Recipe
    repeats: tuple[OutOfMemory, ...] = ()
