"""What every objective says of itself: which rows it makes of records, and the loss of a micro-batch of them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from transformers import PreTrainedTokenizerBase

from recipes.contracts.recipe import Recipe
from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Artifact

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
