"""Direct preference optimization (Rafailov et al. 2023, equation 7): chosen answers become likelier than rejected ones,
measured against the base model.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch.nn.functional import logsigmoid
from transformers import PreTrainedTokenizerBase

from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Artifact
from recipes.training.data.preference_pairs import (
    PreferencePair,
    collate_pairs,
    log_probabilities,
    read_pairs,
    reward_metrics,
)
from recipes.training.model import load_reference_model
from recipes.training.objectives.objective import Batch, Loss, Objective


class Dpo(Objective):
    """The reference is the base: of an adapter the model with it switched off, of full training the base once more.

    It drops nothing out. What is trained does, where the recipe or the base model's configuration asks for it; the code of
    the paper, and TRL, would not.
    """

    padded_behind = True
    _frozen: Any = None

    def rows(
        self, split: Artifact, store: Store, cache: Path, tokenizer: PreTrainedTokenizerBase
    ) -> Sequence[PreferencePair]:
        return read_pairs(split, store, cache, tokenizer, self.recipe)

    def collate(self, rows: Sequence[PreferencePair]) -> Batch:
        return collate_pairs(rows)

    def begin(self, model: Any) -> None:
        if not isinstance(model, PeftModel):
            self._frozen = load_reference_model(model, self.recipe)

    def loss(self, model: Any, batch: Batch) -> Loss:
        reference = self._reference(model, batch)
        rewards = self.recipe.preference_beta * (log_probabilities(model, batch) - reference)
        chosen, rejected = rewards
        return Loss(-logsigmoid(chosen - rejected).mean(), reward_metrics(chosen, rejected))

    @torch.no_grad()
    def _reference(self, model: Any, batch: Batch) -> torch.Tensor:
        if self._frozen is not None:
            return log_probabilities(self._frozen, batch)
        plain = getattr(model, "module", model)  # inside of what shares it among processes
        trains = plain.training
        plain.eval()
        try:
            with plain.disable_adapter():
                return log_probabilities(plain, batch)
        finally:
            plain.train(trains)
