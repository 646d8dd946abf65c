"""Which checkpoints stay: the newest few, and the one with the lowest validation loss (specification rows I1, I7). Pure."""

from collections.abc import Mapping

from pydantic import ValidationError

from recipes.schema import Manifest

VALIDATION_LOSS = "validation_loss"
"""The fact in a checkpoint's manifest that tells the best one; only a step at which the model was evaluated has it."""


def from_the_best(losses: Mapping[int, float | None]) -> list[int]:
    """The steps that have a validation loss, from the lowest; of equal ones the earliest first."""
    known = {step: loss for step, loss in losses.items() if loss is not None}
    return sorted(known, key=lambda step: (known[step], step))


def kept(losses: Mapping[int, float | None], keep_last: int) -> set[int]:
    """Which of the steps stay: the newest `keep_last`, and the best beside them."""
    return {*sorted(losses)[-keep_last:], *from_the_best(losses)[:1]}


def validation_loss(manifest: bytes) -> float | None:
    """What a checkpoint's manifest says of how good the model was; None where it says nothing, or is none."""
    try:
        loss = Manifest.model_validate_json(manifest).facts.get(VALIDATION_LOSS)
    except ValidationError:
        return None
    return loss if isinstance(loss, float) else None
