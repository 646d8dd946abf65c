"""The rows to train on: packed, of one length, from records or from a prepared split."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from recipes.contracts.recipe import Recipe
from recipes.counted import counted
from recipes.runner import say
from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Artifact
from recipes.training.data.examples import cut_at, filled_by_prompts
from recipes.training.data.packing import PackedRows
from recipes.training.prepared_rows import is_prepared, prepared_rows
from recipes.training.raw_rows import raw_rows


def packed(split: Artifact, store: Store, cache: Path, tokenizer: PreTrainedTokenizerBase, recipe: Recipe) -> PackedRows:
    """The rows to train on: of a prepared split as they are stored, of any other tokenized and packed here."""
    folder = store.fetch(split, cache)
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if is_prepared(folder):
        manifest = store.manifest(split)
        prepared = prepared_rows(folder, manifest, tokenizer, recipe, padding)
        say(f"{counted(prepared.num_records, 'prepared record')}, {size_of(prepared)}")
        before = manifest.facts.get("truncated")
        if isinstance(before, int) and before:
            say(f"{counted(before, 'record')} of all splits, cut at tokenize.max_length by the preparation")
        if prepared.truncated:
            say(f"{counted(prepared.truncated, 'record')} {cut_at(recipe.sequence_length)}")
        if prepared.left_out:
            say(f"{counted(prepared.left_out, 'record')} {filled_by_prompts(recipe.sequence_length)}")
        return prepared
    rows = raw_rows(folder, cache, tokenizer, recipe, padding)
    say(f"{counted(rows.num_records, 'record')}, {size_of(rows)}")
    return rows


def size_of(rows: PackedRows) -> str:
    return f"{counted(rows.num_tokens, 'token')}, {counted(len(rows), 'row')}"
