"""Supervised fine-tuning on packed rows."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Artifact
from recipes.training.data.packing import collate
from recipes.training.data.rows import load_packed_rows
from recipes.training.objectives.objective import Batch, Objective, Rows


class Sft(Objective):
    packed = True

    def rows(self, split: Artifact, store: Store, cache: Path, tokenizer: PreTrainedTokenizerBase) -> Rows:
        return load_packed_rows(split, store, cache, tokenizer, self.recipe, self.rendering)

    def collate(self, rows: Sequence[dict[str, torch.Tensor]]) -> Batch:
        return collate(rows)
