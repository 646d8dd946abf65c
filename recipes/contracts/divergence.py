"""What a run does when its loss diverges (row Y7)."""

from typing import Literal

from pydantic import Field

from recipes.contracts.frozen_model import YamlModel


class DivergencePolicy(YamlModel):
    """What a run does when its loss diverges.

    Both actions go back to the last good checkpoint. `stop` ends there, and the gate judges what the run had learned; `skip`
    goes on without the samples of the bad steps, at most three times, and then stops.
    """

    action: Literal["stop", "skip"] = "stop"
    band: float = Field(3.0, gt=0, description="running deviations above the running mean that are still no divergence")
    patience: int = Field(20, ge=1, description="steps on end above the band; a loss that is not finite needs none")


def first_corrupt_step(first: int) -> int:
    """The first step whose weights are bad, where `first` is the first with a bad loss: the update before made them so."""
    return max(1, first - 1)
