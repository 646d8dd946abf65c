"""The rows to train on: packed, of one length, from records or from a prepared split."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from recipes.examples import cut_at, filled_by_prompts
from recipes.manifest import Artifact
from recipes.recipe import Recipe
from recipes.runner import say
from recipes.store import Store
from recipes.training.packed_rows import PackedRows
from recipes.training.prepared_rows import is_prepared, prepared_rows
from recipes.training.raw_rows import raw_rows


def packed(split: Artifact, store: Store, cache: Path, tokenizer: PreTrainedTokenizerBase, recipe: Recipe) -> PackedRows:
    """The rows to train on: of a prepared split as they are stored, of any other tokenized and packed here."""
    folder = store.fetch(split, cache)
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if is_prepared(folder):
        manifest = store.manifest(split)
        prepared = prepared_rows(folder, manifest, tokenizer, recipe, padding)
        say(f"{prepared.num_records} prepared records, {prepared.num_tokens} tokens, {len(prepared)} rows")
        if before := manifest.facts.get("truncated"):
            say(f"{before} records, of all splits, were cut at tokenize.max_length when they were prepared")
        if prepared.truncated:
            say(f"{prepared.truncated} records {cut_at(recipe.sequence_length)}")
        if prepared.left_out:
            say(f"{prepared.left_out} records {filled_by_prompts(recipe.sequence_length)}")
        return prepared
    rows = raw_rows(folder, cache, tokenizer, recipe, padding)
    say(f"{rows.num_records} records, {rows.num_tokens} tokens, {len(rows)} rows")
    return rows
