"""Metrics of a micro-batch, kept on the device until they are logged."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from recipes.training.metrics.validation_loss import WeightedMeans


@dataclass(frozen=True)
class MicrobatchMetrics:
    """Like `WeightedMeans`, but the means may be on the device."""

    means: Mapping[str, float | torch.Tensor]
    weight: int


def fetch_metrics(metrics: Sequence[MicrobatchMetrics], device: torch.device) -> list[WeightedMeans]:
    """Copy all metrics to the host in one transfer; as float64, which is exact."""
    means = [torch.as_tensor(mean, dtype=torch.float64, device=device) for batch in metrics for mean in batch.means.values()]
    found = iter(torch.stack(means).tolist() if means else ())
    return [WeightedMeans({name: next(found) for name in batch.means}, batch.weight) for batch in metrics]
