"""What a run does when its loss diverges."""

from typing import Literal

from pydantic import Field

from recipes.contracts.frozen_model import YamlModel


class DivergencePolicy(YamlModel):
    """Policy for a diverging loss.

    Both actions return to the last good checkpoint. `stop` ends there, and the gate judges the result; `skip` continues
    without the samples of the bad steps, at most three times, and then stops.
    """

    action: Literal["stop", "skip"] = "stop"
    band: float = Field(3.0, gt=0, description="height of the normal band above the running mean, in running deviations")
    patience: int = Field(20, ge=1, description="consecutive steps above the band; a non-finite loss counts at once")


def first_corrupt_step(first: int) -> int:
    """Return the first step with bad weights, given the first with a bad loss.

    They come from the update before.
    """
    return max(1, first - 1)
