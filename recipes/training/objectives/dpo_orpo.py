"""Preference optimization: DPO against a reference model, and ORPO without one."""

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
    token_log_probabilities,
)
from recipes.training.model import load_reference_model
from recipes.training.objectives.objective import Batch, Loss, Objective

# Direct preference optimization (Rafailov et al. 2023, equation 7): chosen answers become more likely than rejected ones,
# relative to the base model.


class Dpo(Objective):
    """DPO.

    The reference is the base model: with the adapter disabled, or for full training a frozen copy. The reference runs
    without dropout. The trained model uses dropout if the recipe or the base model's configuration asks for it, unlike in
    the paper's code and TRL.
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
        plain = getattr(model, "module", model)  # unwrap DDP
        trains = plain.training
        plain.eval()
        try:
            with plain.disable_adapter():
                return log_probabilities(plain, batch)
        finally:
            plain.train(trains)


# Odds ratio preference optimization (Hong et al. 2024, equations 3 to 7): supervised fine-tuning on the chosen answers plus
# the odds ratio of chosen to rejected answers; no reference model.

MAX_LOG_PROBABILITY = -1e-7
"""Maximum mean log-probability: an answer that is certain in float32 would have 0."""


class Orpo(Objective):
    """ORPO. `beta` is the paper's lambda, the weight of the odds ratio term.

    Both terms are means over pairs, like the paper's expectation (equation 6), which weights all micro-batches of a step
    equally; a mean over a micro-batch's tokens would not. Both use answers alone (equations 1 to 3), where TRL's
    likelihood includes prompts. A reward is the mean log-probability of an answer; TRL reports `beta` times that.
    """

    padded_behind = True

    def rows(
        self, split: Artifact, store: Store, cache: Path, tokenizer: PreTrainedTokenizerBase
    ) -> Sequence[PreferencePair]:
        return read_pairs(split, store, cache, tokenizer, self.recipe)

    def collate(self, rows: Sequence[PreferencePair]) -> Batch:
        return collate_pairs(rows)

    def loss(self, model: Any, batch: Batch) -> Loss:
        found, inside = token_log_probabilities(model, batch)
        chosen, rejected = (found.sum(-1) / inside.sum(-1)).view(2, -1)
        log_odds = compute_log_odds(chosen) - compute_log_odds(rejected)
        value = -chosen.mean() - self.recipe.preference_beta * logsigmoid(log_odds).mean()
        return Loss(value, reward_metrics(chosen, rejected))


def compute_log_odds(log_probability: torch.Tensor) -> torch.Tensor:
    """log(p / (1 - p)), exact for p near 1.

    P = 1 is clamped to the next smaller value, to stay finite.
    """
    log_probability = log_probability.clamp(max=MAX_LOG_PROBABILITY)
    return log_probability - torch.log(-torch.expm1(log_probability))
