"""A prepared split as rows for training: its tokens are read where they lie."""

from pathlib import Path

import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from recipes.contracts.job import BadConfiguration
from recipes.contracts.parameters import PrepareParameters
from recipes.contracts.recipe import Recipe
from recipes.preparation.tables import open_table
from recipes.preparation.tokenization.frozen_tokenizer import fingerprint
from recipes.storage.manifest import Manifest
from recipes.training.data.packing import PackedRows


def is_prepared(folder: Path) -> bool:
    """Whether a split holds tokens, not texts alone."""
    return any(folder.glob("*.arrow"))


def prepared_rows(
    folder: Path, manifest: Manifest, tokenizer: PreTrainedTokenizerBase, recipe: Recipe, padding: int
) -> PackedRows:
    """Rows of `sequence_length` tokens.

    Raises:
        BadConfiguration: the split was tokenized with another tokenizer or system prompt than the recipe's, or none of its
            records teaches anything within sequence_length.
    """
    check(manifest, tokenizer, recipe)
    table = pa.concat_tables([open_table(file) for file in sorted(folder.glob("*.arrow"))])
    return PackedRows(table, recipe.sequence_length, padding)


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
