"""The configuration of a sweep: the specification's sweep file as a type."""

from typing import Literal, Self

from pydantic import Field, JsonValue, model_validator

from recipes.contracts.frozen_model import FrozenModel, YamlModel
from recipes.contracts.job import Hardware
from recipes.contracts.quantities import pluralize
from resources.hpo.search_space import Dimension, grid_size, grid_values

Strategy = Literal["grid", "random", "bayesian", "pbt", "successive_halving"]
SHAPES_WEIGHTS = frozenset({"method", "lora_rank", "lora_target_modules", "base_model", "model", "recipe", "architecture"})
"""Hyperparameters that determine the shape of the weights: members of a population cannot copy weights across them."""


class Objective(FrozenModel):
    """The metric whose last value in a trial's run is the trial's value."""

    metric: str = Field(min_length=1, max_length=250)
    direction: Literal["minimize", "maximize"] = "minimize"


class EarlyStopping(YamlModel):
    """Stop a trial whose objective has not improved by more than `min_delta` for `patience` evaluations."""

    patience: int = Field(3, ge=1)
    min_delta: float = Field(0.001, ge=0, allow_inf_nan=False)


class Halving(YamlModel):
    """At `min_steps` times each power of `reduction_factor`, the best one in `reduction_factor` trials continues."""

    reduction_factor: int = Field(3, ge=2)
    min_steps: int | None = Field(None, ge=1, description="steps before the first cut; base_config.eval_steps when unset")


class Population(YamlModel):
    """Population-based training: `population` members train for `generations` parts of base_config.max_steps each."""

    population: int | None = Field(None, ge=1, description="2 at least; max_concurrent_trials when unset")
    generations: int | None = Field(None, ge=1, description="as many as max_trials has room for when unset")


class SweepRequest(YamlModel):
    """A sweep request.

    `base_config` has the keys of a job (model, method or recipe, dataset) and of its recipe.
    """

    experiment: str = Field(min_length=1, max_length=250)
    base_config: dict[str, JsonValue]
    search_space: dict[str, Dimension] = Field(min_length=1)
    strategy: Strategy = "bayesian"
    sampler: Literal["tpe", "gp"] = Field(
        "tpe", description="for strategy bayesian: Parzen estimators, or a Gaussian process"
    )
    objective: Objective
    max_trials: int = Field(50, ge=1, le=10_000)
    max_concurrent_trials: int = Field(8, ge=1)
    early_stopping: EarlyStopping | None = None
    resources_per_trial: Hardware | None = None
    successive_halving: Halving = Halving()
    pbt: Population = Population()
    seed: int = 42

    def completed(self, strategy: Strategy, max_concurrent_trials: int) -> "SweepConfig":
        """Fill in the server's settings where the request has none. Raises pydantic's ValidationError."""
        given = self.model_dump(mode="json", exclude_unset=True)
        return SweepConfig.model_validate({"strategy": strategy, "max_concurrent_trials": max_concurrent_trials, **given})


class SweepConfig(SweepRequest):
    """A sweep whose strategy has been checked."""

    @model_validator(mode="after")
    def check_strategy(self) -> Self:
        if both := sorted(self.search_space.keys() & self.base_config.keys()):
            raise ValueError(f"{both[0]} is in base_config and in search_space: remove one of them")
        if self.strategy == "grid":
            self._check_grid()
        if self.strategy == "pbt":
            self._check_population()
        if self.strategy == "successive_halving":
            _ = self.first_rung
        return self

    def _check_grid(self) -> None:
        endless = [name for name, dimension in self.search_space.items() if not grid_values(dimension)]
        if endless:
            raise ValueError(f"strategy grid needs `points` (or type: choice) for {endless[0]}")
        if (size := grid_size(self.search_space)) > self.max_trials:
            raise ValueError(
                f"the grid has {size} combinations and max_trials is {self.max_trials}: raise it, or reduce the search space"
            )

    def _check_population(self) -> None:
        if shaping := sorted(self.search_space.keys() & SHAPES_WEIGHTS):
            raise ValueError(f"strategy pbt copies weights, and {shaping[0]} changes their shape: set it in base_config")
        if not isinstance(self.base_config.get("max_steps"), int):
            raise ValueError("strategy pbt needs base_config.max_steps, which its generations share")
        if self.population * self.generations > self.max_trials:
            raise ValueError(
                f"{pluralize(self.population, 'member')} in {pluralize(self.generations, 'generation')} are "
                f"{pluralize(self.population * self.generations, 'trial')} and max_trials is {self.max_trials}: raise it"
            )

    @property
    def wanted_trials(self) -> int:
        """Return the total number of trials."""
        if self.strategy == "grid":
            return grid_size(self.search_space)
        return self.population * self.generations if self.strategy == "pbt" else self.max_trials

    @property
    def population(self) -> int:
        return self.pbt.population or min(self.max_concurrent_trials, self.max_trials)

    @property
    def generations(self) -> int:
        return self.pbt.generations or max(1, self.max_trials // self.population)

    @property
    def first_rung(self) -> int:
        """Return the steps before the first cut of successive halving.

        Raises:
            ValueError: neither setting states it.
        """
        first = self.successive_halving.min_steps or self.base_config.get("eval_steps")
        if not isinstance(first, int) or first < 1:
            raise ValueError("strategy successive_halving needs successive_halving.min_steps or base_config.eval_steps")
        return first
