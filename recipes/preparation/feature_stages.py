"""What the features were fitted to becomes a column of each record, computed as a server does (specification row C5)."""

from functools import lru_cache
from pathlib import Path

import pyarrow as pa

from recipes.preparation import encode_stage
from recipes.preparation.fitting import BATCH, FOLDER, decode
from recipes.preparation.plan import Plan
from recipes.preparation.shuffle_stage import COMPUTED
from recipes.preparation.tables import open_table, write_table
from recipes.records import key_index
from recipes.records.features import COLUMN, INDEX, ONLINE, STATE, FeatureState, aggregates_of, apply
from recipes.records.fingerprint import canonical_line, fingerprints


def compute(plan: Plan, index: int) -> None:
    """Range `index` as the stage before the fit has left it, each record with its features."""
    target = plan.place(COMPUTED, index, "arrow")
    if target.is_file():
        return
    table = open_table(plan.place(encode_stage.STAGE, index, "arrow"))
    write_table(target, table.schema, map(Computer(plan.work / FOLDER).batch, table.to_batches(max_chunksize=BATCH)))


class Computer:
    """Adds their features to records, by the files of a folder."""

    def __init__(self, folder: Path) -> None:
        self.state = FeatureState.model_validate_json((folder / STATE).read_bytes())
        if self.state.features.aggregates:
            lines, index = key_index.reader(folder / ONLINE), key_index.reader(folder / INDEX)
            size = (folder / INDEX).stat().st_size
            self.find = lru_cache(maxsize=BATCH)(lambda key: key_index.find(key, lines, index, size)[COLUMN])

    def batch(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        rows = [decode(raw) for raw in batch.column("record").to_pylist()]
        for row in rows:
            aggregates = aggregates_of(self.state, row, self.find) if self.state.features.aggregates else None
            row[COLUMN] = apply(self.state, row, aggregates)
        lines = list(map(canonical_line, rows))
        said, own = fingerprints(rows, lines)
        for name, values in (("record", lines), ("own", own), ("said", said)):
            place = batch.schema.get_field_index(name)
            batch = batch.set_column(place, batch.schema.field(place), pa.array(values, batch.schema.field(place).type))
        return batch
