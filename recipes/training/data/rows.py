"""Load a split as packed rows, from prepared tokens or from raw records."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from recipes.contracts.job import BadConfiguration
from recipes.contracts.parameters import PrepareParameters
from recipes.contracts.quantities import pluralize
from recipes.contracts.recipe import Recipe
from recipes.contracts.rendering import CURRENT_RENDERING, Rendering
from recipes.preparation.plan import open_table, write_table
from recipes.preparation.tokenization.frozen_tokenizer import fingerprint_tokenizer
from recipes.preparation.tokenization.record_tokenizer import TOKEN_FIELDS, build_token_columns
from recipes.records.record_reader import iterate_records
from recipes.runner import log_line
from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Artifact, Manifest
from recipes.training.data.examples import ExampleTally, describe_prompt_overflow, describe_truncation, make_record_tokenizer
from recipes.training.data.packing import PackedRows

# A prepared split as rows for training; tokens are memory-mapped, not copied.


def is_prepared(folder: Path) -> bool:
    """Return whether a split holds tokens, not only texts."""
    return any(folder.glob("*.arrow"))


def load_prepared_rows(
    folder: Path, manifest: Manifest, tokenizer: PreTrainedTokenizerBase, recipe: Recipe, padding: int
) -> PackedRows:
    """Return rows of `sequence_length` tokens from a prepared split.

    Raises:
        BadConfiguration: the split was tokenized with another tokenizer or system prompt than the recipe's, or no record has
            a token to learn within sequence_length.
    """
    check_tokenization(manifest, tokenizer, recipe)
    table = pa.concat_tables([open_table(file) for file in sorted(folder.glob("*.arrow"))])
    return PackedRows(table, recipe.sequence_length, padding)


def check_tokenization(manifest: Manifest, tokenizer: PreTrainedTokenizerBase, recipe: Recipe) -> None:
    """Raise BadConfiguration if the tokens were made for another tokenizer or system prompt."""
    prepared = PrepareParameters.model_validate(manifest.facts["parameters"]).tokenize
    if manifest.facts.get("tokenizer") != fingerprint_tokenizer(tokenizer) or prepared is None:
        raise BadConfiguration(
            f"the dataset was prepared with the tokenizer '{prepared.tokenizer if prepared else None}', which is not the "
            f"base model's: prepare it with `tokenizer: recipe:{recipe.name}`"
        )
    if prepared.system_prompt != recipe.system_prompt:
        raise BadConfiguration(
            f"the dataset was prepared with the system prompt {prepared.system_prompt!r}, the recipe's is "
            f"{recipe.system_prompt!r}: they must be the same"
        )


# A split of raw records as rows for training: tokenized in blocks, into a temporary file.
#
# Neither records nor tokens are held in memory, which took nine times the size of the file.

RECORDS_PER_BLOCK = 1000
"""Number of records that are tokenized together."""
TOKEN_SCHEMA = pa.schema(TOKEN_FIELDS)


def tokenize_rows(
    folder: Path,
    scratch: Path,
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
    padding: int,
    rendering: Rendering = CURRENT_RENDERING,
) -> PackedRows:
    """Tokenize records into an unlinked file in `scratch`, deleted when the process ends.

    Raises:
        BadConfiguration: a record has no known layout, or none can be trained on.
    """
    tally = ExampleTally(recipe.sequence_length)
    with TemporaryDirectory(dir=scratch, prefix="tokens-") as place:
        file = Path(place) / "tokens.arrow"
        write_table(file, TOKEN_SCHEMA, tokenize_batches(folder, tokenizer, recipe, tally, rendering))
        table = open_table(file)
    tally.report_losses()
    return PackedRows(table, recipe.sequence_length, padding)


def tokenize_batches(
    folder: Path, tokenizer: PreTrainedTokenizerBase, recipe: Recipe, tally: ExampleTally, rendering: Rendering
) -> Iterator[pa.RecordBatch]:
    encoder = make_record_tokenizer(tokenizer, recipe.system_prompt, rendering)
    records = iterate_records(folder)
    while block := list(islice(records, RECORDS_PER_BLOCK)):
        if rendering is not Rendering.AS_STORED:
            tally.count_unread(block)
        found = encoder.tokenize([record.row for record in block], [record.layout for record in block])
        if kept := list(tally.select_records(found)):
            yield pa.record_batch(build_token_columns(kept, None, 0), schema=TOKEN_SCHEMA)


def load_packed_rows(
    split: Artifact,
    store: Store,
    cache: Path,
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
    rendering: Rendering = CURRENT_RENDERING,
) -> PackedRows:
    """Load a split as packed rows; a raw split is tokenized and packed here."""
    folder = store.fetch(split, cache)
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if is_prepared(folder):
        manifest = store.manifest(split)
        prepared = load_prepared_rows(folder, manifest, tokenizer, recipe, padding)
        log_line(f"{pluralize(prepared.num_records, 'prepared record')}, {describe_size(prepared)}")
        truncated_before = manifest.facts.get("truncated")
        if isinstance(truncated_before, int) and truncated_before:
            log_line(f"{pluralize(truncated_before, 'record')} of all splits, cut at tokenize.max_length by the preparation")
        if prepared.num_truncated:
            log_line(f"{pluralize(prepared.num_truncated, 'record')} {describe_truncation(recipe.sequence_length)}")
        if prepared.num_left_out:
            log_line(f"{pluralize(prepared.num_left_out, 'record')} {describe_prompt_overflow(recipe.sequence_length)}")
        return prepared
    rows = tokenize_rows(folder, cache, tokenizer, recipe, padding, rendering)
    log_line(f"{pluralize(rows.num_records, 'record')}, {describe_size(rows)}")
    return rows


def describe_size(rows: PackedRows) -> str:
    return f"{pluralize(rows.num_tokens, 'token')}, {pluralize(len(rows), 'row')}"
