"""Select the checkpoints to keep. Pure functions.

Kept are the newest few, the one with the lowest validation loss, and the last one before a loss that may be diverging.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import ValidationError

from recipes.contracts.divergence import first_corrupt_step
from recipes.storage.manifest import Manifest

VALIDATION_LOSS_KEY = "validation_loss"
"""Manifest fact of a checkpoint: its validation loss, present if the step was evaluated."""
DOUBTED_SINCE_KEY = "doubted_since"
"""Manifest fact of a checkpoint: the step since which the loss had been above its band when it was saved, if it was."""


@dataclass(frozen=True)
class CheckpointQuality:
    """Indicators of a model's quality in a checkpoint's manifest."""

    loss: float | None = None
    doubted_since: int | None = None


def rank_by_loss(losses: Mapping[int, float | None]) -> list[int]:
    """Return steps with a validation loss, lowest first, then earliest."""
    known = {step: loss for step, loss in losses.items() if loss is not None}
    return sorted(known, key=lambda step: (known[step], step))


def select_kept_steps(standings: Mapping[int, CheckpointQuality], keep_last: int) -> set[int]:
    """Return the steps to keep: the newest `keep_last`, and the best.

    While the loss is above its band, the newest checkpoint from before is kept too: all later ones are discarded if the run
    has diverged, and several intervals may pass until that is certain.
    """
    steps = sorted(standings)
    since = standings[steps[-1]].doubted_since if steps else None
    sound = [step for step in steps if since and step < first_corrupt_step(since)]
    best = rank_by_loss({step: standing.loss for step, standing in standings.items()})
    return {*steps[-keep_last:], *best[:1], *sound[-1:]}


def parse_quality(manifest: bytes) -> CheckpointQuality:
    """Parse the quality from a manifest; empty if it is missing or invalid."""
    try:
        facts = Manifest.model_validate_json(manifest).facts
    except ValidationError:
        return CheckpointQuality()
    loss, since = facts.get(VALIDATION_LOSS_KEY), facts.get(DOUBTED_SINCE_KEY)
    return CheckpointQuality(loss if isinstance(loss, float) else None, since if isinstance(since, int) else None)
