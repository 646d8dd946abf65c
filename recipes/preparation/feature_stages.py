"""Fit features to the training records, and compute them for every record."""

import json
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from recipes.contracts.job import BadConfiguration
from recipes.contracts.parameters import FeatureParameters
from recipes.preparation import encode_stage
from recipes.preparation.feature_statistics import (
    FIT_STAGE,
    MERGED_FOLDER,
    ExactMoments,
    KeyStatistics,
    count_keys,
    final_tables,
    group_by_key,
    merge_tables,
    write_key_table,
)
from recipes.preparation.plan import Plan, atomic_path, open_table, write_table
from recipes.preparation.read_stage import clean_parameters
from recipes.preparation.shuffle_stage import COMPUTED_STAGE
from recipes.preparation.split_assignment import TRAIN
from recipes.preparation.split_stage import SPLIT_STAGE
from recipes.records import key_index
from recipes.records.features import (
    FEATURES_COLUMN,
    ONLINE_FILE,
    ONLINE_INDEX_FILE,
    STATE_FILE,
    FeatureState,
    Scale,
    compute_features,
    find_aggregates,
    one_hot_column,
    parse_category,
    parse_number,
    read_entity_key,
    select_clean_rules,
)
from recipes.records.fingerprint import encode_canonical_line, encode_stored_line, fingerprint_records

# Features that depend on all records, computed after records have splits.
#
# fit (range) -> build_state -> merge (tables of ranges) -> write_feature_files -> compute (range)
#
# Each range collects statistics of categories, numbers and keys; the first pod combines them into the files that the version
# is served from.

FEATURES_FOLDER = "features"
"""Folder in the work folder for the files that the version is served from."""
MAX_CATEGORIES = 1000
BATCH_ROWS = 1024
decode_json = msgspec.json.Decoder().decode


def feature_files(plan: Plan) -> list[Path]:
    """Return the files in `FEATURES_FOLDER`, the state last."""
    keyed = [ONLINE_FILE, ONLINE_INDEX_FILE] if feature_parameters(plan).key is not None else []
    return [plan.work / FEATURES_FOLDER / name for name in (*keyed, STATE_FILE)]


def fit_files(plan: Plan, index: int) -> list[Path]:
    return [plan.place(FIT_STAGE, index, suffix) for suffix in ("arrow", "json")]


def feature_parameters(plan: Plan) -> FeatureParameters:
    assert plan.parameters.features is not None
    return plan.parameters.features


def fit_range(plan: Plan, index: int) -> None:
    """Fit range `index`: scales and categories from its training records, aggregates from all."""
    table_file, facts_file = fit_files(plan, index)
    if facts_file.is_file():
        return
    wanted = feature_parameters(plan)
    splits, _ = np.load(plan.place(SPLIT_STAGE, index, "npy"))
    moments: dict[str, ExactMoments] = defaultdict(ExactMoments)
    categories: dict[str, set[str]] = defaultdict(set)
    keys: dict[str, tuple[dict[str, Any], dict[str, ExactMoments]]] = {}
    kept_columns = [*wanted.columns, *([wanted.key] if wanted.key is not None else [])]
    for split, raw in zip(splits.tolist(), read_records(plan, index), strict=True):
        row = decode_json(raw)
        for column, rule in wanted.columns.items() if split == TRAIN else ():
            if rule.normalize is not None and (number := parse_number(row.get(column), column)) is not None:
                moments[column].add(number)
            if rule.encode is not None and (category := parse_category(row.get(column), column)) is not None:
                categories[column].add(category)
                check_category_count(column, categories[column])
        if (key := read_entity_key(wanted, row)) is not None:
            key_moments = keys[key][1] if key in keys else {column: ExactMoments() for column in wanted.aggregate}
            keys[key] = ({column: row[column] for column in kept_columns if column in row}, key_moments)
            for column in wanted.aggregate:
                if (number := parse_number(row.get(column), column)) is not None:
                    key_moments[column].add(number)
    ordered = sorted((key_index.hash_key(key), key) for key in keys)
    write_key_table(table_file, ((hashed, key, KeyStatistics(*keys[key]).to_json()) for hashed, key in ordered))
    facts = {
        "moments": {column: found.to_json() for column, found in moments.items()},
        "categories": {column: sorted(found) for column, found in categories.items()},
    }
    with atomic_path(facts_file) as part:
        part.write_text(json.dumps(facts), encoding="utf-8")


def read_records(plan: Plan, index: int) -> Iterator[bytes]:
    for batch in (
        open_table(plan.place(encode_stage.STAGE, index, "arrow")).select(["record"]).to_batches(max_chunksize=BATCH_ROWS)
    ):
        yield from batch.column("record").to_pylist()


def list_pending_merges(plan: Plan) -> list[tuple[int, int]]:
    """Return level and number of the merged tables that `write_feature_files` still needs.

    Tables of ranges are excluded.
    """
    *keyed, state_file = feature_files(plan)
    return [(level, number) for level, number in final_tables(plan) if level and keyed and not state_file.is_file()]


def write_feature_files(plan: Plan, state: FeatureState) -> None:
    """Combine the ranges' statistics into the files of `FEATURES_FOLDER`.

    Holds one batch of up to `fan` tables in memory.

    Raises:
        BadConfiguration: a sum exceeds the range of floats.
    """
    *keyed, state_file = feature_files(plan)
    if state_file.is_file():
        return
    # Leftovers of a killed process would be published with the rest.
    shutil.rmtree(plan.work / FEATURES_FOLDER, ignore_errors=True)
    if keyed:
        online, index = keyed
        tables = [merge_tables(plan, level, number) for level, number in final_tables(plan)]
        with atomic_path(online) as online_part, atomic_path(index) as index_part:
            key_index.write_key_index(
                online_part, index_part, count_keys(tables), make_online_lines(state, group_by_key(tables))
            )
    with atomic_path(state_file) as part:
        part.write_bytes(encode_canonical_line(state.model_dump(mode="json")) + b"\n")
    shutil.rmtree(plan.work / MERGED_FOLDER, ignore_errors=True)


def build_state(plan: Plan) -> FeatureState:
    """Combine the column statistics of all ranges.

    Raises:
        BadConfiguration: no training record has a value in a column, or it has too many distinct ones.
    """
    wanted = feature_parameters(plan)
    moments: dict[str, ExactMoments] = defaultdict(ExactMoments)
    categories: dict[str, set[str]] = defaultdict(set)
    for index in range(len(plan.ranges)):
        facts = json.loads(plan.place(FIT_STAGE, index, "json").read_bytes())
        for column, found in facts["moments"].items():
            moments[column].merge(ExactMoments.from_json(found))
        for column, found in facts["categories"].items():
            categories[column].update(found)
            check_category_count(column, categories[column])
    for column in wanted.columns:
        if column not in moments and column not in categories:
            raise BadConfiguration(f"no training record has a value in '{column}' of features.columns: remove it")
    names = [name for column, found in categories.items() for name in (one_hot_column(column, each) for each in found)]
    if taken := set(names) & {*wanted.columns, *wanted.aggregates}:
        raise BadConfiguration(f"the column '{min(taken)}' has the same name as a category's feature: rename it")
    return FeatureState(
        features=wanted,
        clean=select_clean_rules(wanted, clean_parameters(plan.parameters)),
        categories={column: tuple(sorted(found)) for column, found in sorted(categories.items())},
        scales={column: make_scale(moments[column], str(wanted.columns[column].normalize)) for column in sorted(moments)},
    )


def check_category_count(column: str, categories: set[str]) -> None:
    if len(categories) > MAX_CATEGORIES:
        raise BadConfiguration(
            f"'{column}' has more than {MAX_CATEGORIES} categories: remove it from features.columns, or make it the key"
        )


def make_scale(moments: ExactMoments, normalize: str) -> Scale:
    if normalize == "standard":
        return Scale(shift=moments.aggregate("mean") or 0.0, unit=moments.aggregate("std") or 0.0)
    return Scale(shift=moments.minimum, unit=min(moments.maximum - moments.minimum, np.finfo(np.float64).max.item()))


def make_online_lines(state: FeatureState, keys: Iterable[tuple[int, str, list[bytes]]]) -> Iterator[tuple[int, bytes]]:
    """Yield each key's hash and the features of its last record."""
    for hashed, key, found in keys:
        fitted = KeyStatistics.combine(found)
        wanted = state.features.aggregates.items()
        aggregates = {name: fitted.moments[column].aggregate(function) for name, (column, function) in wanted}
        yield hashed, encode_canonical_line({"key": key, FEATURES_COLUMN: compute_features(state, fitted.last, aggregates)})


# Features become a column of each record, computed exactly as in serving.


def compute_range(plan: Plan, index: int) -> None:
    """Add features to the encoded records of range `index`."""
    target = plan.place(COMPUTED_STAGE, index, "arrow")
    if target.is_file():
        return
    table = open_table(plan.place(encode_stage.STAGE, index, "arrow"))
    write_table(
        target,
        table.schema,
        map(FeatureComputer(plan.work / FEATURES_FOLDER).batch, table.to_batches(max_chunksize=BATCH_ROWS)),
    )


class FeatureComputer:
    """Adds features to records, using the files of a folder."""

    def __init__(self, folder: Path) -> None:
        self.state = FeatureState.model_validate_json((folder / STATE_FILE).read_bytes())
        if self.state.features.aggregates:
            lines, index = (
                key_index.make_file_reader(folder / ONLINE_FILE),
                key_index.make_file_reader(folder / ONLINE_INDEX_FILE),
            )
            size = (folder / ONLINE_INDEX_FILE).stat().st_size
            self.find = lru_cache(maxsize=BATCH_ROWS)(
                lambda key: key_index.find_by_key(key, lines, index, size)[FEATURES_COLUMN]
            )

    def batch(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        rows = [decode_json(raw) for raw in batch.column("record").to_pylist()]
        for row in rows:
            aggregates = find_aggregates(self.state, row, self.find) if self.state.features.aggregates else None
            row[FEATURES_COLUMN] = compute_features(self.state, row, aggregates)
        lines = list(map(encode_stored_line, rows))
        said, own = fingerprint_records(rows, lines)
        for name, values in (("record", lines), ("own", own), ("said", said)):
            place = batch.schema.get_field_index(name)
            batch = batch.set_column(place, batch.schema.field(place), pa.array(values, batch.schema.field(place).type))
        return batch
