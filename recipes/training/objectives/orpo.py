"""Odds ratio preference optimization (Hong et al. 2024, equations 3 to 7): supervised fine-tuning on the chosen answers, and
beside it their odds against those of the rejected ones; no reference model.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import logsigmoid
from transformers import PreTrainedTokenizerBase

from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Artifact
from recipes.training.data.preference_pairs import (
    PreferencePair,
    collate_pairs,
    read_pairs,
    reward_metrics,
    token_log_probabilities,
)
from recipes.training.objectives.objective import Batch, Loss, Objective

MAX_LOG_PROBABILITY = -1e-7
"""Of a mean log-probability: an answer that is certain in float32 has 0."""


class Orpo(Objective):
    """`beta` is the paper's lambda: the weight of the odds ratio beside the likelihood of the chosen answers.

    Both are means over pairs, as the paper's expectation is (equation 6): equal for every micro-batch of a step. A mean over
    the tokens of a micro-batch would not be. Both are of answers alone (equations 1 to 3), where TRL's likelihood is of
    prompts too. A reward is the mean log-probability of an answer; TRL tells `beta` times that.
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
    """log(p / (1 - p)), exact for p near 1; of p = 1, where it is infinite and has no slope, that of the p next to it."""
    log_probability = log_probability.clamp(max=MAX_LOG_PROBABILITY)
    return log_probability - torch.log(-torch.expm1(log_probability))
