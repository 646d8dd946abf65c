"""A search space: the possible values of each hyperparameter.

Pure functions of a given random source.
"""

import itertools
import math
import random
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, FiniteFloat, model_validator

from recipes.contracts.frozen_model import FrozenModel, refuse_boolean

Scalar = bool | int | FiniteFloat | str
Value = Scalar | list[Scalar] | None
"""JSON values: target modules are a list, and null leaves a recipe's key unset."""
Params = Mapping[str, Any]
"""The `Value` of each hyperparameter, by name."""
Number = Annotated[FiniteFloat, BeforeValidator(refuse_boolean)]
EXPONENT = re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]{1,3}")
PERTURBATION_FACTORS = (0.8, 1.2)
"""Factors for a perturbed number, as in the paper on population-based training (Jaderberg et al. 2017)."""


def parse_number(value: Any) -> Any:
    """Parse numbers such as `1e-5`, which YAML 1.1 reads as text.

    YAML 1.1 requires a decimal point in floats.

    Raises:
        ValueError: the value is not a scalar.
    """
    if not isinstance(value, bool | int | float | str):
        raise ValueError("must be a number, a text, true, false or null, or a list of numbers, texts, true and false")
    return float(value) if isinstance(value, str) and EXPONENT.fullmatch(value) else value


def parse_value(value: Any) -> Any:
    """Parse a value of a choice.

    Raises:
        ValueError: it is not a scalar, null or a list of scalars.
    """
    if isinstance(value, list):
        return [parse_number(each) for each in value]
    return None if value is None else parse_number(value)


class Uniform(FrozenModel):
    """Any number from `min` to `max`; on a grid, `points` evenly spaced numbers."""

    type: Literal["uniform"]
    min: Number
    max: Number
    points: int | None = Field(None, ge=2, le=1000)

    @model_validator(mode="after")
    def check_range(self) -> Self:
        if self.min >= self.max:
            raise ValueError("min must be less than max")
        return self

    def at(self, share: float) -> float:
        """Return the value at a share (0 to 1) of the range."""
        return min(max(self.min + share * (self.max - self.min), self.min), self.max)


class LogUniform(Uniform):
    """The same on a logarithmic scale: equal ratios instead of equal distances."""

    type: Literal["log_uniform"]  # type: ignore[assignment]  # the discriminator

    @model_validator(mode="after")
    def check_positive(self) -> Self:
        if self.min <= 0:
            raise ValueError("min of a log_uniform must be more than 0")
        return self

    def at(self, share: float) -> float:
        # Not computed from the ratio, which may overflow: then every value was the last one.
        return min(max(math.pow(self.min, 1.0 - share) * math.pow(self.max, share), self.min), self.max)


class Choice(FrozenModel):
    """One of the values; their order matters to some strategies."""

    type: Literal["choice"]
    values: tuple[Annotated[Value, BeforeValidator(parse_value)], ...] = Field(min_length=1)

    def at(self, share: float) -> Value:
        return self.values[min(int(share * len(self.values)), len(self.values) - 1)]


Dimension = Annotated[LogUniform | Uniform | Choice, Field(discriminator="type")]
Space = Mapping[str, Dimension]


def grid_values(dimension: Dimension) -> Sequence[Value]:
    """Return the values of a dimension on a grid; empty if it is continuous."""
    if isinstance(dimension, Choice):
        return dimension.values
    if dimension.points is None:
        return ()
    return [dimension.at(point / (dimension.points - 1)) for point in range(dimension.points)]


def grid_size(space: Space) -> int:
    return math.prod(len(grid_values(dimension)) for dimension in space.values())


def grid_point(space: Space, number: int) -> Params:
    """Return combination `number` of the grid; the last hyperparameter varies fastest."""
    combinations = itertools.product(*(grid_values(dimension) for dimension in space.values()))
    return dict(zip(space, next(itertools.islice(combinations, number, None)), strict=True))


def sample_params(space: Space, rng: random.Random) -> Params:
    """Sample each hyperparameter at random."""
    return {name: dimension.at(rng.random()) for name, dimension in space.items()}


def perturb_params(space: Space, params: Params, rng: random.Random) -> Params:
    """Return values near the given ones.

    Numbers are multiplied by one of `PERTURBATION_FACTORS`; choices are at most one place away.
    """
    return {name: perturb_value(dimension, params[name], rng) for name, dimension in space.items()}


def perturb_value(dimension: Dimension, value: Value, rng: random.Random) -> Value:
    if isinstance(dimension, Choice):
        place = dimension.values.index(value) + rng.choice((-1, 0, 1))
        return dimension.values[min(max(place, 0), len(dimension.values) - 1)]
    return min(max(to_float(value) * rng.choice(PERTURBATION_FACTORS), dimension.min), dimension.max)


def to_float(value: Value) -> float:
    """Convert a value of a numeric range."""
    assert isinstance(value, int | float | str)
    return float(value)


def axis_share(dimension: Dimension, value: Value) -> float:
    """Return the position (0 to 1) of a value on its axis."""
    if isinstance(dimension, Choice):
        return dimension.values.index(value) / max(len(dimension.values) - 1, 1)
    if isinstance(dimension, LogUniform):
        return range_share(*(math.log(each) for each in (to_float(value), dimension.min, dimension.max)))
    return range_share(to_float(value), dimension.min, dimension.max)


def range_share(value: float, low: float, high: float) -> float:
    """Return the relative position of `value` between `low` and `high`; 0.5 if they are equal."""
    return (value - low) / (high - low) if high > low else 0.5
