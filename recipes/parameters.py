"""What each program is told: the types of `Job.parameters`."""

from typing import Literal

from pydantic import Field

from recipes.recipe import Recipe
from recipes.schema import Frozen


class TrainParameters(Frozen):
    """Fine-tune with a recipe."""

    recipe: Recipe


class PrepareParameters(Frozen):
    """Split a dataset version."""

    seed: int = 42
    validation: float = Field(0.1, gt=0, lt=1)
    test: float = Field(0.1, gt=0, lt=1)
    group_by: str | None = Field(None, description="column whose values are spread over the splits")


class EvaluateParameters(Frozen):
    """Score the base, the tuned and the last accepted model on the same held-out records."""

    recipe: Recipe
    max_new_tokens: int = Field(24, ge=1)
    samples: int | None = Field(None, ge=1, description="generate answers for the first N test records; all when unset")
    questions: tuple[str, ...] = Field((), description="asked too and reported, not scored")


class ConvertParameters(Frozen):
    """Merge the adapter into its base and export."""

    recipe: Recipe
    quantization: Literal["F16", "BF16", "Q8_0"] = "Q8_0"
