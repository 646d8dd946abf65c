"""Which checkpoints stay: the newest few, the one with the lowest validation loss, and one from before a loss that may be
diverging (specification rows I1, I7). Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import ValidationError

from recipes.contracts.divergence import first_corrupt_step
from recipes.storage.manifest import Manifest

VALIDATION_LOSS_KEY = "validation_loss"
"""The fact in a checkpoint's manifest that tells the best one; only a step at which the model was evaluated has it."""
DOUBTED_SINCE_KEY = "doubted_since"
"""The fact in a checkpoint's manifest: from which step on the loss had been above its band as it was saved, where it was."""


@dataclass(frozen=True)
class CheckpointQuality:
    """What a checkpoint's manifest says of how good the model was."""

    loss: float | None = None
    doubted_since: int | None = None


def rank_by_loss(losses: Mapping[int, float | None]) -> list[int]:
    """The steps that have a validation loss, from the lowest; of equal ones the earliest first."""
    known = {step: loss for step, loss in losses.items() if loss is not None}
    return sorted(known, key=lambda step: (known[step], step))


def select_kept_steps(standings: Mapping[int, CheckpointQuality], keep_last: int) -> set[int]:
    """Which of the steps stay: the newest `keep_last`, and the best beside them.

    While the loss is above its band, the newest from before that does too: the others are all discarded if it has diverged,
    and until that is certain, a few intervals may pass.
    """
    steps = sorted(standings)
    since = standings[steps[-1]].doubted_since if steps else None
    sound = [step for step in steps if since and step < first_corrupt_step(since)]
    best = rank_by_loss({step: standing.loss for step, standing in standings.items()})
    return {*steps[-keep_last:], *best[:1], *sound[-1:]}


def parse_quality(manifest: bytes) -> CheckpointQuality:
    """Nothing where it says nothing, or is none."""
    try:
        facts = Manifest.model_validate_json(manifest).facts
    except ValidationError:
        return CheckpointQuality()
    loss, since = facts.get(VALIDATION_LOSS_KEY), facts.get(DOUBTED_SINCE_KEY)
    return CheckpointQuality(loss if isinstance(loss, float) else None, since if isinstance(since, int) else None)
