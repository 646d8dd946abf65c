"""Supervised fine-tuning: the answers' tokens become likelier, in packed rows."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from recipes.manifest import Artifact
from recipes.store import Store
from recipes.training.objectives.objective import Batch, Objective, Rows
from recipes.training.packing import collate
from recipes.training.rows import packed


class Sft(Objective):
    packed = True

    def rows(self, split: Artifact, store: Store, cache: Path, tokenizer: PreTrainedTokenizerBase) -> Rows:
        return packed(split, store, cache, tokenizer, self.recipe)

    def collate(self, rows: Sequence[dict[str, torch.Tensor]]) -> Batch:
        return collate(rows)
