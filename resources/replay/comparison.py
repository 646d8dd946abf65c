"""Whether two runs came out the same: every step's loss, then the final weights' hash. Pure."""

import math
from collections.abc import Mapping
from typing import Literal

from recipes.contracts.frozen_model import Frozen

Loss = float | Literal["not finite", "missing"]


class StepDifference(Frozen):
    """The losses of the first step at which two runs part."""

    step: int
    then: Loss
    now: Loss


class FileDifference(Frozen):
    """SHA-256 of a file of weights in both runs; null where one does not have it."""

    path: str
    then: str | None
    now: str | None


class Comparison(Frozen):
    """`steps` counts the losses compared; `first_difference` and `weights` say where two runs part, if they do."""

    steps: int
    first_difference: StepDifference | None
    weights: tuple[FileDifference, ...]

    @property
    def equal(self) -> bool:
        return self.first_difference is None and not self.weights


def compare(
    then: Mapping[int, float | None],
    now: Mapping[int, float | None],
    weights_then: Mapping[str, str],
    weights_now: Mapping[str, str],
) -> Comparison:
    """Compare step -> loss, and path -> SHA-256.

    Equal means every bit. A loss that is not finite is NaN or None, and equals another one that is not.
    """
    steps = sorted({*then, *now})
    pairs = ((step, loss_at(then, step), loss_at(now, step)) for step in steps)
    first = next((StepDifference(step=step, then=a, now=b) for step, a, b in pairs if a != b), None)
    files = [(path, weights_then.get(path), weights_now.get(path)) for path in sorted({*weights_then, *weights_now})]
    return Comparison(
        steps=len(steps),
        first_difference=first,
        weights=tuple(FileDifference(path=path, then=a, now=b) for path, a, b in files if a != b),
    )


def loss_at(losses: Mapping[int, float | None], step: int) -> Loss:
    """A step's loss, so that `==` says what this file calls equal."""
    if step not in losses:
        return "missing"
    loss = losses[step]
    return loss if loss is not None and math.isfinite(loss) else "not finite"
