"""What the objective of somebody else gives, looked at before it is used: what is wrong is said by its name.

Some of it did not fail otherwise: a tensor in place of a `Loss` was taken for the model's own, whose gradients are not
divided by the accumulation; without rows the search for the first one never ended.
"""

import re
from collections.abc import Sized
from numbers import Real

import torch

from recipes.contracts.job import BadConfiguration
from recipes.training.metrics.metric_names import TAKEN
from recipes.training.objectives.objective import Loss, Objective, Rows

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


def rows_given(objective: Objective, found: object) -> Rows:
    """Raises BadConfiguration: they are no rows, or none at all."""
    if not isinstance(found, Sized) or not hasattr(found, "__getitem__"):
        raise wrong(objective, f"rows() gave {a(found)}: return what has a length, and rows by their number")
    if len(found) == 0:
        raise wrong(objective, "rows() gave none: a split needs one at least")
    return found  # type: ignore[return-value]


def loss_given(objective: Objective, found: object, *, trains: bool) -> Loss | None:
    """Reads nothing from the device. Raises BadConfiguration: no scalar, or one from which nothing would be learned."""
    if found is None:
        return None
    if not isinstance(found, Loss):
        raise wrong(objective, f"loss() gave {a(found)}: return a Loss, or None for the model's own cross-entropy")
    if not is_scalar(found.value):
        raise wrong(objective, f"the value of its Loss is {a(found.value)}: give a tensor with one number, as mean() does")
    if trains and not found.value.requires_grad:
        raise wrong(objective, "its loss does not depend on what is trained: compute it without detach() and no_grad()")
    for name, mean in found.metrics.items():
        if not isinstance(name, str) or not NAME.fullmatch(name) or name in TAKEN:
            taken = f"letters, digits, '_', '.' and '-', and none of {', '.join(TAKEN)}"
            raise wrong(objective, f"it tells a metric {name!r:.100}: name it with {taken}")
        if not isinstance(mean, Real) and not is_scalar(mean):
            raise wrong(objective, f"its metric '{name}' is {a(mean)}: tell one number")
    return found


def is_scalar(found: object) -> bool:
    return isinstance(found, torch.Tensor) and found.dim() == 0


def a(found: object) -> str:
    """What something is, in words."""
    shape = f" of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else ""
    return f"{type(found).__name__}{shape}"


def wrong(objective: Objective, what: str) -> BadConfiguration:
    return BadConfiguration(f"objective {objective.recipe.objective}: {what}")
