"""The rows to train on: packed, of one length, from records or from a prepared split."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from recipes.examples import cut_at, encode, filled_by_prompts
from recipes.recipe import Recipe
from recipes.records import read_records
from recipes.runner import say
from recipes.schema import Artifact
from recipes.store import Store
from recipes.training.packing import pack
from recipes.training.prepared_rows import PreparedRows, is_prepared


def packed(
    split: Artifact, store: Store, cache: Path, tokenizer: PreTrainedTokenizerBase, recipe: Recipe
) -> Sequence[dict[str, torch.Tensor]] | PreparedRows:
    """The rows to train on: of a prepared split as they are stored, of any other tokenized and packed here."""
    folder = store.fetch(split, cache)
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if is_prepared(folder):
        manifest = store.manifest(split)
        prepared = PreparedRows(folder, manifest, tokenizer, recipe, padding)
        say(f"{prepared.num_records} prepared records, {prepared.num_tokens} tokens, {len(prepared)} rows")
        if before := manifest.facts.get("truncated"):
            say(f"{before} records, of all splits, were cut at tokenize.max_length when they were prepared")
        if prepared.truncated:
            say(f"{prepared.truncated} records {cut_at(recipe.sequence_length)}")
        if prepared.left_out:
            say(f"{prepared.left_out} records {filled_by_prompts(recipe.sequence_length)}")
        return prepared
    records = read_records(folder)
    examples = encode(tokenizer, records, recipe.system_prompt, recipe.sequence_length)
    rows = pack(examples, recipe.sequence_length, padding)
    say(f"{len(examples)} records, {sum(len(example.tokens) for example in examples)} tokens, {len(rows)} rows")
    return [vars(row) for row in rows]
