"""Which checkpoints stay: the newest few, the one with the lowest validation loss, and one from before a loss that may be
diverging (specification rows I1, I7). Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import ValidationError

from recipes.contracts.divergence import spoilt_from
from recipes.storage.manifest import Manifest

VALIDATION_LOSS = "validation_loss"
"""The fact in a checkpoint's manifest that tells the best one; only a step at which the model was evaluated has it."""
DOUBTED_SINCE = "doubted_since"
"""The fact in a checkpoint's manifest: from which step on the loss had been above its band as it was saved, where it was."""


@dataclass(frozen=True)
class Standing:
    """What a checkpoint's manifest says of how good the model was."""

    loss: float | None = None
    doubted_since: int | None = None


def from_the_best(losses: Mapping[int, float | None]) -> list[int]:
    """The steps that have a validation loss, from the lowest; of equal ones the earliest first."""
    known = {step: loss for step, loss in losses.items() if loss is not None}
    return sorted(known, key=lambda step: (known[step], step))


def kept(standings: Mapping[int, Standing], keep_last: int) -> set[int]:
    """Which of the steps stay: the newest `keep_last`, and the best beside them.

    While the loss is above its band, the newest from before that does too: the others are all discarded if it has diverged,
    and until that is certain, a few intervals may pass.
    """
    steps = sorted(standings)
    since = standings[steps[-1]].doubted_since if steps else None
    sound = [step for step in steps if since and step < spoilt_from(since)]
    best = from_the_best({step: standing.loss for step, standing in standings.items()})
    return {*steps[-keep_last:], *best[:1], *sound[-1:]}


def standing_of(manifest: bytes) -> Standing:
    """Nothing where it says nothing, or is none."""
    try:
        facts = Manifest.model_validate_json(manifest).facts
    except ValidationError:
        return Standing()
    loss, since = facts.get(VALIDATION_LOSS), facts.get(DOUBTED_SINCE)
    return Standing(loss if isinstance(loss, float) else None, since if isinstance(since, int) else None)
