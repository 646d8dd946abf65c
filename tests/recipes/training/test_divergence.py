"""Divergence detection: explosions count, learning and noise do not; the first bad step is named."""

import math
import random

import pytest

from recipes.contracts.divergence import DivergencePolicy
from recipes.training.divergence import (
    MEDIAN_BAND_FACTOR,
    MEDIAN_LOSSES,
    MIN_DEVIATION_SHARE,
    WARMUP_LOSSES,
    Divergence,
    LossBand,
)

LEARNING = [2.0 + 8.0 * math.exp(-step / 60) + random.Random(step).gauss(0, 0.3) for step in range(1, 401)]


def first_found(losses: list[float], policy: DivergencePolicy) -> Divergence | None:
    band = LossBand(policy)
    return next(filter(None, (band.add(step, loss) for step, loss in enumerate(losses, 1))), None)


def test_learning_and_a_few_high_losses_are_not_divergence() -> None:
    assert first_found(LEARNING, DivergencePolicy()) is None
    high = [*LEARNING[:200], *[20.0] * 19, *LEARNING[200:]]
    assert first_found(high, DivergencePolicy()) is None


def test_loss_band_is_unlimited_then_wide_during_warmup() -> None:
    band = LossBand(DivergencePolicy())
    limits: list[object] = []
    for step in range(1, WARMUP_LOSSES + 1):
        limits.append(band.limit)
        band.add(step, 1.0)
    wider = pytest.approx(1.0 + MEDIAN_BAND_FACTOR * 3.0 * MIN_DEVIATION_SHARE)
    assert limits == [math.inf] * MEDIAN_LOSSES + [wider] * (WARMUP_LOSSES - MEDIAN_LOSSES)
    assert band.limit == pytest.approx(1.0 + 3.0 * MIN_DEVIATION_SHARE)


def test_small_change_of_a_smooth_low_loss_is_not_divergence() -> None:
    assert first_found([0.01] * 100 + [0.05] * 100, DivergencePolicy()) is None


def test_loss_staying_above_its_band_diverged_at_its_first_high_step() -> None:
    found = first_found([*LEARNING[:200], *[6.0] * 50], DivergencePolicy(patience=10))
    assert found is not None
    assert (found.first, found.noticed) == (201, 210)


def test_divergence_in_the_first_updates_is_detected() -> None:
    """There used to be no band during the first twenty losses.

    If losses were high by then, the band was derived from them.
    """
    climbing = [2.1, 2.0, 2.2, 2.1, 2.3, 3.4, *[min(7.5, 4.5 + 0.2 * step) for step in range(60)]]
    found = first_found(climbing, DivergencePolicy())
    assert found is not None and (found.first, found.noticed) == (8, 27)
    assert first_found([*climbing[:20], *[2.0] * 40], DivergencePolicy()) is None, "it came back"


def test_typical_early_losses_are_not_divergence() -> None:
    noise = random.Random(3)
    rewarmed = [2.2 + 0.8 * math.sin(min(step, 150) / 150 * math.pi) + noise.gauss(0, 0.1) for step in range(300)]
    small_batches = [2.0 * math.exp(noise.gauss(0, 0.6)) for _ in range(300)]
    dpo = [math.log(2)] * 3 + [math.log1p(math.exp(-noise.gauss(step / 60, 1.2))) for step in range(300)]
    orpo = [2.4 * math.exp(-step / 80) + 0.1 * math.log(2) + abs(noise.gauss(0, 0.3)) for step in range(300)]
    from_nothing = [10.8 * math.exp(-step / 200) + noise.gauss(0, 0.05) for step in range(300)]
    for losses in (rewarmed, small_batches, dpo, orpo, from_nothing):
        assert first_found(losses, DivergencePolicy()) is None


def test_non_finite_loss_is_divergence_immediately() -> None:
    for bad in (math.nan, math.inf):
        found = first_found([7.0, 6.5, bad, 6.0], DivergencePolicy())
        assert found is not None and (found.first, found.noticed) == (3, 3)


def test_divergence_starts_at_the_explosion_before_a_non_finite_loss() -> None:
    found = first_found([*LEARNING[:100], 50.0, 900.0, math.nan], DivergencePolicy())
    assert found is not None and (found.first, found.noticed) == (101, 103)
