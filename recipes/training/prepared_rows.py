"""A prepared split as rows for training: the tokens stay in their Arrow files, and a row is packed when it is asked for.

Which records share a row is a function of their lengths alone, so that a resumed run sees the same rows in the same order.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from recipes.examples import IGNORED, Example
from recipes.parameters import PrepareParameters
from recipes.preparation.tables import open_table
from recipes.preparation.tokenizer import fingerprint
from recipes.recipe import Recipe
from recipes.schema import BadConfiguration, Manifest
from recipes.training.packing import first_fit, row_of


def is_prepared(folder: Path) -> bool:
    """Whether a split holds tokens, not texts alone."""
    return any(folder.glob("*.arrow"))


class PreparedRows(Dataset[dict[str, torch.Tensor]]):
    """Packed rows of `sequence_length` tokens; each item is what `recipes.training.packing.Row` holds.

    Raises:
        BadConfiguration: the split was tokenized with another tokenizer or system prompt than the recipe's, or none of its
            records teaches anything within sequence_length.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, tokenizer: PreTrainedTokenizerBase, recipe: Recipe, padding: int
    ) -> None:
        check(manifest, tokenizer, recipe)
        self._table = pa.concat_tables([open_table(file) for file in sorted(folder.glob("*.arrow"))])
        self._length = recipe.sequence_length
        self._padding = padding
        whole = self._table.column("length").to_numpy()
        lengths = np.minimum(whole, self._length)
        kept = np.flatnonzero(learned(self._table.column("assistant_mask"), lengths) > 0)
        if not len(kept):
            raise BadConfiguration(f"no answer fits into sequence_length {self._length}: raise it in the recipe")
        self.num_records = len(kept)
        self.left_out = len(whole) - len(kept)
        self.truncated = int((whole[kept] > self._length).sum())
        self.num_tokens = int(lengths[kept].sum(dtype=np.int64))
        self._rows = [kept[chosen] for chosen in first_fit(lengths[kept].tolist(), self._length)]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return vars(row_of([self._example(int(record)) for record in self._rows[index]], self._length, self._padding))

    def _example(self, record: int) -> Example:
        length = min(self._table.column("length")[record].as_py(), self._length)
        tokens = self._table.column("input_ids")[record].values[:length].to_numpy()
        mask = self._table.column("assistant_mask")[record].values[:length].to_numpy(zero_copy_only=False)
        return Example(tuple(tokens.tolist()), tuple(np.where(mask, tokens, IGNORED).tolist()))


def check(manifest: Manifest, tokenizer: PreTrainedTokenizerBase, recipe: Recipe) -> None:
    """Refuse tokens that mean something else to the model that is to be trained."""
    prepared = PrepareParameters.model_validate(manifest.facts["parameters"]).tokenize
    if manifest.facts.get("tokenizer") != fingerprint(tokenizer) or prepared is None:
        raise BadConfiguration(
            f"the dataset was prepared with the tokenizer '{prepared.tokenizer if prepared else None}', which is not the "
            f"base model's: prepare it with `tokenizer: recipe:{recipe.name}`"
        )
    if prepared.system_prompt != recipe.system_prompt:
        raise BadConfiguration(
            f"the dataset was prepared with the system prompt {prepared.system_prompt!r}, the recipe's is "
            f"{recipe.system_prompt!r}: they must be the same"
        )


def learned(mask: pa.ChunkedArray, lengths: NDArray[np.int32]) -> NDArray[np.int64]:
    """How many tokens are learned of the first `lengths` of each record; nothing predicts a record's first token."""
    counts = []
    done = 0
    for chunk in mask.chunks:
        here = lengths[done : done + len(chunk)]
        done += len(chunk)
        starts = chunk.offsets.to_numpy()[:-1] - chunk.offsets[0].as_py()
        before = np.cumsum(chunk.flatten().to_numpy(zero_copy_only=False))
        counts.append(before[starts + here - 1] - before[starts])
    return np.concatenate([*counts, np.zeros(0, dtype=np.int64)])
