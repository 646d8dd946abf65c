"""The cost of a run: zero without GPUs, absent where the price is unknown."""

import pytest

from hanzo_ml_assets.run_metrics import usage_metrics
from recipes.contracts.results import Usage

PRICES = {"nvidia-a100-80gb": 3.0}


@pytest.mark.parametrize(
    ("gpus", "gpu_type", "dollars"),
    [(2, "nvidia-a100-80gb", 6.0), (0, None, 0.0), (0, "nvidia-a100-80gb", 0.0), (2, "another", None), (2, None, None)],
)
def test_dollars_are_gpu_hours_times_the_price(gpus: int, gpu_type: str | None, dollars: float | None) -> None:
    metrics = usage_metrics(Usage(gpus=gpus, gpu_seconds=3600.0 * gpus, seconds=3600.0), gpu_type, PRICES)
    assert metrics["system/total_gpu_hours"] == gpus
    assert metrics.get("system/dollars") == dollars
