"""A split of records as rows for training: tokenized some at a time, into a file that nobody else sees (row B18).

Memory holds neither the records nor their tokens, which took nine times as much of it as the file has.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from recipes.contracts.recipe import Recipe
from recipes.preparation.tables import open_table, write_table
from recipes.preparation.tokenization.record_tokenizer import TOKEN_FIELDS, token_columns
from recipes.records.record_reader import each_record
from recipes.training.data.examples import Tally, record_tokenizer
from recipes.training.data.packing import PackedRows

BLOCK = 1000
"""Records that are tokenized together."""
SCHEMA = pa.schema(TOKEN_FIELDS)


def raw_rows(folder: Path, scratch: Path, tokenizer: PreTrainedTokenizerBase, recipe: Recipe, padding: int) -> PackedRows:
    """The file, in `scratch`, has no name any more when this returns: it is gone with the process, however that ends.

    Raises:
        BadConfiguration: a record has no layout, or none can be trained on.
    """
    tally = Tally(recipe.sequence_length)
    with TemporaryDirectory(dir=scratch, prefix="tokens-") as place:
        file = Path(place) / "tokens.arrow"
        write_table(file, SCHEMA, batches(folder, tokenizer, recipe, tally))
        table = open_table(file)
    tally.tell()
    return PackedRows(table, recipe.sequence_length, padding)


def batches(folder: Path, tokenizer: PreTrainedTokenizerBase, recipe: Recipe, tally: Tally) -> Iterator[pa.RecordBatch]:
    encoder = record_tokenizer(tokenizer, recipe.system_prompt)
    records = each_record(folder)
    while block := list(islice(records, BLOCK)):
        found = encoder.tokenize([record.row for record in block], [record.layout for record in block])
        if kept := list(tally.kept(found)):
            yield pa.record_batch(token_columns(kept, None, 0), schema=SCHEMA)
