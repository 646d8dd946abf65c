"""Retention: the newest few, the best, and the newest before a suspected divergence."""

import pytest

from recipes.checkpoints.retention import (
    DOUBTED_SINCE_KEY,
    VALIDATION_LOSS_KEY,
    CheckpointQuality,
    parse_quality,
    select_kept_steps,
)
from recipes.storage.manifest import Manifest

DOUBTED = CheckpointQuality(doubted_since=5)


@pytest.mark.parametrize(
    ("standings", "expected"),
    [
        ({}, set()),
        (
            {
                1: CheckpointQuality(0.5),
                2: CheckpointQuality(0.1),
                3: CheckpointQuality(0.1),
                4: CheckpointQuality(),
                5: CheckpointQuality(0.3),
            },
            {2, 4, 5},
        ),
        (
            {1: CheckpointQuality(), 2: CheckpointQuality(), 4: CheckpointQuality(), 6: DOUBTED, 8: DOUBTED},
            {2, 6, 8},
        ),  # a bad loss at step 5 comes from the weights of step 4
        (
            {2: CheckpointQuality(), 4: CheckpointQuality(), 6: DOUBTED, 8: DOUBTED, 9: CheckpointQuality()},
            {8, 9},
        ),  # the suspicion was false
        ({6: DOUBTED, 7: DOUBTED, 8: DOUBTED}, {7, 8}),
    ],
)
def test_retention_keeps_the_newest_two_the_best_and_the_last_undoubted(
    standings: dict[int, CheckpointQuality], expected: set[int]
) -> None:
    assert select_kept_steps(standings, 2) == expected


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({VALIDATION_LOSS_KEY: 0.5, DOUBTED_SINCE_KEY: 3}, CheckpointQuality(0.5, 3)),
        ({VALIDATION_LOSS_KEY: "low", DOUBTED_SINCE_KEY: "lately"}, CheckpointQuality()),
        ({}, CheckpointQuality()),
    ],
)
def test_quality_is_parsed_from_manifest(facts: dict[str, float | str], expected: CheckpointQuality) -> None:
    assert parse_quality(Manifest(kind="checkpoint", files=(), facts=dict(facts)).to_bytes()) == expected


def test_quality_of_invalid_manifest_is_empty() -> None:
    """Corruption is handled on resume; deciding which checkpoints to keep must not end the run."""
    assert parse_quality(b'{"kind": "checkp') == CheckpointQuality()
