"""Which checkpoints stay: the newest few, the best, and while a loss may be diverging the newest from before that."""

import pytest

from recipes.checkpoints.retention import DOUBTED_SINCE, VALIDATION_LOSS, Standing, kept, standing_of
from recipes.storage.manifest import Manifest

DOUBTED = Standing(doubted_since=5)


@pytest.mark.parametrize(
    ("standings", "expected"),
    [
        ({}, set()),
        ({1: Standing(0.5), 2: Standing(0.1), 3: Standing(0.1), 4: Standing(), 5: Standing(0.3)}, {2, 4, 5}),
        ({1: Standing(), 2: Standing(), 4: Standing(), 6: DOUBTED, 8: DOUBTED}, {2, 6, 8}),  # of a bad loss at 5, 4 is too
        ({2: Standing(), 4: Standing(), 6: DOUBTED, 8: DOUBTED, 9: Standing()}, {8, 9}),  # it was none
        ({6: DOUBTED, 7: DOUBTED, 8: DOUBTED}, {7, 8}),
    ],
)
def test_the_newest_two_stay_and_what_may_be_needed_beside_them(standings: dict[int, Standing], expected: set[int]) -> None:
    assert kept(standings, 2) == expected


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({VALIDATION_LOSS: 0.5, DOUBTED_SINCE: 3}, Standing(0.5, 3)),
        ({VALIDATION_LOSS: "low", DOUBTED_SINCE: "lately"}, Standing()),
        ({}, Standing()),
    ],
)
def test_a_manifest_says_how_good_the_model_was(facts: dict[str, float | str], expected: Standing) -> None:
    assert standing_of(Manifest(kind="checkpoint", files=(), facts=dict(facts)).to_bytes()) == expected


def test_what_is_no_manifest_says_nothing() -> None:
    """A broken checkpoint is found out as it is gone on with: it must not end a run that only looks which ones stay."""
    assert standing_of(b'{"kind": "checkp') == Standing()
