"""The base class of training objectives, and checks of what they return."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from transformers import PreTrainedTokenizerBase

from recipes.contracts.job import BadConfiguration
from recipes.contracts.recipe import Recipe
from recipes.contracts.rendering import CURRENT_RENDERING, Rendering
from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Artifact
from recipes.training.metrics.metric_names import RESERVED_NAMES

# What every objective says of itself: which rows it makes of records, and the loss of a micro-batch of them.

Batch = dict[str, torch.Tensor]


class Rows(Protocol):
    """Rows by their number, of which there are as many as it says."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class Loss:
    """A scalar to be minimized, and what else is worth logging of the micro-batch it belongs to, by name.

    Metrics are best left on the device, as detached scalars: they are read with the loss of the step.
    """

    value: torch.Tensor
    metrics: Mapping[str, float | torch.Tensor] = field(default_factory=dict)


class Objective(ABC):
    """Made once for a run."""

    packed: ClassVar[bool] = False
    """Whether its micro-batches are of packed rows, all of one length, with `position_ids` and without a mask."""
    padded_behind: ClassVar[bool] = False
    """Whether they are of rows of one example each, without `position_ids` and without a mask: padding is at their end."""
    rendering: Rendering = CURRENT_RENDERING
    """How the run reads conversations: set before `rows` is called, where the run began in another way."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    @property
    def has_perplexity(self) -> bool:
        """Whether its loss is a cross-entropy, whose exponential is a perplexity."""
        return type(self).loss is Objective.loss

    @abstractmethod
    def rows(self, split: Artifact, store: Store, cache: Path, tokenizer: PreTrainedTokenizerBase) -> Rows:
        """What training draws from, in an order that depends on the split and the recipe alone.

        Raises:
            BadConfiguration: the split's records are not of a layout that this objective reads.
        """

    @abstractmethod
    def collate(self, rows: Sequence[Any]) -> Batch:
        """Some of the rows as a micro-batch; it holds `labels`."""

    def begin(self, model: Any) -> None:
        """Called once with the base model, and its adapter if it gets one, before other weights are loaded into it."""
        return

    def loss(self, model: Any, batch: Batch) -> Loss | None:
        """The mean over the micro-batch. None: the model's own cross-entropy, which is the mean over a step's tokens."""
        return None


# What the objective of somebody else gives, looked at before it is used: what is wrong is said by its name.
#
# Some of it did not fail otherwise: a tensor in place of a `Loss` was taken for the model's own, whose gradients are not
# divided by the accumulation; without rows the search for the first one never ended.

METRIC_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


def check_rows(objective: Objective, found: object) -> Rows:
    """Raises BadConfiguration: they are no rows, or none at all."""
    if not isinstance(found, Sized) or not hasattr(found, "__getitem__"):
        raise objective_error(
            objective, f"rows() gave {describe_value(found)}: return what has a length, and rows by their number"
        )
    if len(found) == 0:
        raise objective_error(objective, "rows() gave none: a split needs one at least")
    return found  # type: ignore[return-value]


def check_loss(objective: Objective, found: object, *, trains: bool) -> Loss | None:
    """Reads nothing from the device. Raises BadConfiguration: no scalar, or one from which nothing would be learned."""
    if found is None:
        return None
    if not isinstance(found, Loss):
        raise objective_error(
            objective, f"loss() gave {describe_value(found)}: return a Loss, or None for the model's own cross-entropy"
        )
    if not is_scalar(found.value):
        raise objective_error(
            objective,
            f"the value of its Loss is {describe_value(found.value)}: give a tensor with one number, as mean() does",
        )
    if trains and not found.value.requires_grad:
        raise objective_error(
            objective, "its loss does not depend on what is trained: compute it without detach() and no_grad()"
        )
    for name, mean in found.metrics.items():
        if not isinstance(name, str) or not METRIC_NAME.fullmatch(name) or name in RESERVED_NAMES:
            allowed = f"letters, digits, '_', '.' and '-', and none of {', '.join(RESERVED_NAMES)}"
            raise objective_error(objective, f"it tells a metric {name!r:.100}: name it with {allowed}")
        if not isinstance(mean, Real) and not is_scalar(mean):
            raise objective_error(objective, f"its metric '{name}' is {describe_value(mean)}: tell one number")
    return found


def is_scalar(found: object) -> bool:
    return isinstance(found, torch.Tensor) and found.dim() == 0


def describe_value(found: object) -> str:
    """What something is, in words."""
    shape = f" of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else ""
    return f"{type(found).__name__}{shape}"


def objective_error(objective: Objective, what: str) -> BadConfiguration:
    return BadConfiguration(f"objective {objective.recipe.objective}: {what}")
