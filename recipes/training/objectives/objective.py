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

# The interface of objectives: rows made from records, and the loss of a micro-batch of them.

Batch = dict[str, torch.Tensor]


class Rows(Protocol):
    """A sized collection of rows by index."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class Loss:
    """A scalar to minimize, and metrics of the same micro-batch to log, by name.

    Leave metrics on the device as detached scalars: they are read together with the step's loss.
    """

    value: torch.Tensor
    metrics: Mapping[str, float | torch.Tensor] = field(default_factory=dict)


class Objective(ABC):
    """Base class of training objectives; created once per run."""

    packed: ClassVar[bool] = False
    """Whether micro-batches hold packed rows of one length, with `position_ids` and without a mask."""
    padded_behind: ClassVar[bool] = False
    """Whether micro-batches hold one example per row, padded on the right, without `position_ids` and mask."""
    rendering: Rendering = CURRENT_RENDERING
    """How conversations are rendered; set before `rows` is called, if the run started with an earlier rendering."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    @property
    def has_perplexity(self) -> bool:
        """Whether the loss is a cross-entropy, whose exponential is a perplexity."""
        return type(self).loss is Objective.loss

    @abstractmethod
    def rows(self, split: Artifact, store: Store, cache: Path, tokenizer: PreTrainedTokenizerBase) -> Rows:
        """Return the training rows, in an order that depends only on split and recipe.

        Raises:
            BadConfiguration: the records have a layout that this objective does not support.
        """

    @abstractmethod
    def collate(self, rows: Sequence[Any]) -> Batch:
        """Collate rows into a micro-batch, which must contain `labels`."""

    def begin(self, model: Any) -> None:
        """Called once with the base model (and its new adapter), before other weights are loaded."""
        return

    def loss(self, model: Any, batch: Batch) -> Loss | None:
        """Return the mean loss of the micro-batch.

        None selects the model's cross-entropy over a step's tokens.
        """
        return None


# Checks of what a custom objective returns, so that the error names it.
#
# Some mistakes did not fail otherwise: a tensor in place of a `Loss` was taken for the model's own loss, whose gradients
# are not divided by the accumulation steps; without rows the search for the first one never ended.

METRIC_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


def check_rows(objective: Objective, found: object) -> Rows:
    """Check the return value of `rows()`.

    Raises:
        BadConfiguration: it is no sized collection, or it is empty.
    """
    if not isinstance(found, Sized) or not hasattr(found, "__getitem__"):
        raise objective_error(
            objective, f"rows() gave {describe_value(found)}: return what has a length, and rows by their number"
        )
    if len(found) == 0:
        raise objective_error(objective, "rows() gave none: a split needs one at least")
    return found  # type: ignore[return-value]


def check_loss(objective: Objective, found: object, *, trains: bool) -> Loss | None:
    """Check the return value of `loss()` without reading from the device.

    Raises:
        BadConfiguration: it is no scalar, or does not depend on trained weights.
    """
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
            raise objective_error(objective, f"it returns a metric {name!r:.100}: name it with {allowed}")
        if not isinstance(mean, Real) and not is_scalar(mean):
            raise objective_error(objective, f"its metric '{name}' is {describe_value(mean)}: return one number")
    return found


def is_scalar(found: object) -> bool:
    return isinstance(found, torch.Tensor) and found.dim() == 0


def describe_value(found: object) -> str:
    """Describe a value by type and shape, for messages."""
    shape = f" of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else ""
    return f"{type(found).__name__}{shape}"


def objective_error(objective: Objective, what: str) -> BadConfiguration:
    return BadConfiguration(f"objective {objective.recipe.objective}: {what}")
