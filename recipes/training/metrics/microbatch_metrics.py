"""What a micro-batch tells of itself, which stays on the device until it is logged: a number that is read there is waited
for, and a GPU that is waited for has nothing to do next.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from recipes.training.metrics.validation_loss import Part


@dataclass(frozen=True)
class Told:
    """A `Part` whose means may be on the device."""

    means: Mapping[str, float | torch.Tensor]
    weight: int


def read(told: Sequence[Told], device: torch.device) -> list[Part]:
    """All that was told, in one transfer; in float64, which changes no number."""
    means = [torch.as_tensor(mean, dtype=torch.float64, device=device) for some in told for mean in some.means.values()]
    found = iter(torch.stack(means).tolist() if means else ())
    return [Part({name: next(found) for name in some.means}, some.weight) for some in told]
