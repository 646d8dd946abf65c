"""After every record has its split: what its features need to know of all others (specification row C5).

fit (range) -> fit_all -> compute (range)

Each range says what it has of each category, number and key; the first pod puts that together, keys a share at a time, and
leaves the files that the version is served by. With these the ranges compute their records' features as a server does.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from recipes import keyed_lines
from recipes.assignment import TRAIN
from recipes.features import (
    COLUMN,
    INDEX,
    ONLINE,
    STATE,
    FeatureState,
    Scale,
    aggregates_of,
    apply,
    category_of,
    clean_for,
    key_of,
    number_of,
    one_hot_name,
)
from recipes.fingerprint import canonical_line, fingerprints
from recipes.parameters import FeatureParameters
from recipes.preparation import encoding
from recipes.preparation.deciding import DECIDED
from recipes.preparation.moments import Moments
from recipes.preparation.ordering import COMPUTED
from recipes.preparation.plan import Plan, written
from recipes.preparation.reading import cleaning_of
from recipes.preparation.tables import open_table, write_table
from recipes.schema import BadConfiguration

FIT = "fit"
FOLDER = "features"
"""Of the work: the files that the version is served by."""
MOST_CATEGORIES = 1000
KEYS_AT_ONCE = 100_000
"""Keys that are put together at a time, in about a kilobyte each."""
BATCH = 1024
KEYS = pa.schema([("hash", pa.uint64()), ("key", pa.string()), ("fitted", pa.large_binary())])
"""What a range has of each key, in their order: the columns of its last record, and the moments of its numbers."""
decode = msgspec.json.Decoder().decode


def files_of(plan: Plan) -> list[Path]:
    """The files of `FOLDER`, the state last."""
    keyed = [ONLINE, INDEX] if declared(plan).key is not None else []
    return [plan.work / FOLDER / name for name in (*keyed, STATE)]


def fitted_files(plan: Plan, index: int) -> list[Path]:
    return [plan.place(FIT, index, suffix) for suffix in ("arrow", "json")]


def declared(plan: Plan) -> FeatureParameters:
    assert plan.parameters.features is not None
    return plan.parameters.features


def fit(plan: Plan, index: int) -> None:
    """Fit range `index`: scales and categories to its training records, the rest to all of it."""
    table_file, facts_file = fitted_files(plan, index)
    if facts_file.is_file():
        return
    wanted = declared(plan)
    splits, _ = np.load(plan.place(DECIDED, index, "npy"))
    moments: dict[str, Moments] = defaultdict(Moments)
    categories: dict[str, set[str]] = defaultdict(set)
    keys: dict[str, tuple[dict[str, Any], dict[str, Moments]]] = {}
    asked = [*wanted.columns, *([wanted.key] if wanted.key is not None else [])]
    for split, raw in zip(splits.tolist(), records(plan, index), strict=True):
        row = decode(raw)
        for column, how in wanted.columns.items() if split == TRAIN else ():
            if how.normalize is not None and (number := number_of(row.get(column), column)) is not None:
                moments[column].add(number)
            if how.encode is not None and (category := category_of(row.get(column), column)) is not None:
                categories[column].add(category)
                refuse_too_many(column, categories[column])
        if (key := key_of(wanted, row)) is not None:
            of_key = keys[key][1] if key in keys else {column: Moments() for column in wanted.aggregate}
            keys[key] = ({column: row[column] for column in asked if column in row}, of_key)
            for column in wanted.aggregate:
                if (number := number_of(row.get(column), column)) is not None:
                    of_key[column].add(number)
    ordered = sorted((keyed_lines.hash_of(key), key) for key in keys)
    write_table(table_file, KEYS, key_batches(ordered, keys))
    facts = {
        "moments": {column: found.to_json() for column, found in moments.items()},
        "categories": {column: sorted(found) for column, found in categories.items()},
    }
    with written(facts_file) as part:
        part.write_text(json.dumps(facts))


def key_batches(
    ordered: Sequence[tuple[int, str]], keys: Mapping[str, tuple[dict[str, Any], dict[str, Moments]]]
) -> Iterator[pa.RecordBatch]:
    for begin in range(0, len(ordered), BATCH):
        chosen = ordered[begin : begin + BATCH]
        fitted = []
        for _, key in chosen:
            last, of_key = keys[key]
            fitted.append(json.dumps([last, {column: found.to_json() for column, found in of_key.items()}]).encode())
        hashes, names = [hashed for hashed, _ in chosen], [key for _, key in chosen]
        yield pa.record_batch([pa.array(hashes, pa.uint64()), names, pa.array(fitted, pa.large_binary())], schema=KEYS)


def records(plan: Plan, index: int) -> Iterator[bytes]:
    for batch in open_table(plan.place(encoding.STAGE, index, "arrow")).select(["record"]).to_batches(max_chunksize=BATCH):
        yield from batch.column("record").to_pylist()


def fit_all(plan: Plan) -> None:
    """Put together what the ranges have, as the files of `FOLDER`.

    Raises:
        BadConfiguration: no training record has a value in a column, or too many have different ones.
    """
    *keyed, state_file = files_of(plan)
    if state_file.is_file():
        return
    state = state_of(plan)
    if keyed:
        online, index = keyed
        with written(online) as online_part, written(index) as index_part:
            tables = [open_table(plan.place(FIT, number, "arrow")) for number in range(len(plan.ranges))]
            count = sum(1 for _ in merged(tables))
            keyed_lines.write(online_part, index_part, count, online_lines(state, merged(tables)))
    with written(state_file) as part:
        part.write_bytes(canonical_line(state.model_dump(mode="json")) + b"\n")


def state_of(plan: Plan) -> FeatureState:
    wanted = declared(plan)
    moments: dict[str, Moments] = defaultdict(Moments)
    categories: dict[str, set[str]] = defaultdict(set)
    for index in range(len(plan.ranges)):
        facts = json.loads(plan.place(FIT, index, "json").read_bytes())
        for column, found in facts["moments"].items():
            moments[column].merge(Moments.from_json(found))
        for column, found in facts["categories"].items():
            categories[column].update(found)
            refuse_too_many(column, categories[column])
    for column in wanted.columns:
        if column not in moments and column not in categories:
            raise BadConfiguration(f"no training record has a value in '{column}' of features.columns: leave it out")
    names = [name for column, found in categories.items() for name in (one_hot_name(column, each) for each in found)]
    if taken := set(names) & {*wanted.columns, *wanted.aggregates}:
        raise BadConfiguration(f"the column '{min(taken)}' has the name of a category's feature: rename it")
    return FeatureState(
        features=wanted,
        clean=clean_for(wanted, cleaning_of(plan.parameters)),
        categories={column: tuple(sorted(found)) for column, found in sorted(categories.items())},
        scales={column: scale_of(moments[column], str(wanted.columns[column].normalize)) for column in sorted(moments)},
    )


def refuse_too_many(column: str, categories: set[str]) -> None:
    if len(categories) > MOST_CATEGORIES:
        raise BadConfiguration(
            f"'{column}' has more than {MOST_CATEGORIES} categories: leave it out of features.columns, or make it the key"
        )


def scale_of(moments: Moments, normalize: str) -> Scale:
    if normalize == "standard":
        return Scale(shift=moments.of("mean") or 0.0, unit=moments.of("std") or 0.0)
    return Scale(shift=moments.least, unit=min(moments.most - moments.least, np.finfo(np.float64).max.item()))


def merged(tables: Sequence[pa.Table]) -> Iterator[tuple[int, str, dict[str, Any], dict[str, Moments]]]:
    """What all ranges have of each key, in the order of the keys; its last record is that of the last range."""
    hashes = [table.column("hash").to_numpy() for table in tables]
    shares = max(1, sum(map(len, hashes)) // KEYS_AT_ONCE)
    for share in range(shares):
        low, high = -(-(share << 64) // shares), -(-((share + 1) << 64) // shares) - 1
        found: dict[tuple[int, str], tuple[dict[str, Any], dict[str, Moments]]] = {}
        for table, known in zip(tables, hashes, strict=True):
            begin, end = np.searchsorted(known, np.uint64(low)), np.searchsorted(known, np.uint64(high), side="right")
            for batch in table.slice(begin, end - begin).to_batches(max_chunksize=BATCH):
                for hashed, key, fitted in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                    last, given = json.loads(fitted)
                    _, of_key = found.get((hashed, key), (None, {}))
                    for column, numbers in given.items():
                        of_key.setdefault(column, Moments()).merge(Moments.from_json(numbers))
                    found[hashed, key] = (last, of_key)
        for (hashed, key), (last, of_key) in sorted(found.items(), key=lambda item: item[0]):
            yield hashed, key, last, of_key


def online_lines(
    state: FeatureState, keys: Iterator[tuple[int, str, dict[str, Any], dict[str, Moments]]]
) -> Iterator[tuple[int, bytes]]:
    """Of each key the features of its last record."""
    for hashed, key, last, of_key in keys:
        aggregates = {name: of_key[column].of(function) for name, (column, function) in state.features.aggregates.items()}
        yield hashed, canonical_line({"key": key, COLUMN: apply(state, last, aggregates)})


def compute(plan: Plan, index: int) -> None:
    """Range `index` as the stage before the fit has left it, each record with its features."""
    target = plan.place(COMPUTED, index, "arrow")
    if target.is_file():
        return
    table = open_table(plan.place(encoding.STAGE, index, "arrow"))
    write_table(target, table.schema, map(Computer(plan.work / FOLDER).batch, table.to_batches(max_chunksize=BATCH)))


class Computer:
    """Adds their features to records, by the files of a folder."""

    def __init__(self, folder: Path) -> None:
        self.state = FeatureState.model_validate_json((folder / STATE).read_bytes())
        if self.state.features.aggregates:
            lines, index = keyed_lines.reader(folder / ONLINE), keyed_lines.reader(folder / INDEX)
            size = (folder / INDEX).stat().st_size
            self.find = lru_cache(maxsize=BATCH)(lambda key: keyed_lines.find(key, lines, index, size)[COLUMN])

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
