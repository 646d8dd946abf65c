"""After every record has its split: what its features need to know of all others (specification row C5).

fit (range) -> state_of -> merge (tables of ranges) -> fit_all -> compute (range)

Each range says what it has of each category, number and key; the first pod puts that together and leaves the files that the
version is served by.
"""

import json
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from recipes.contracts.job import BadConfiguration
from recipes.contracts.parameters import FeatureParameters
from recipes.preparation import encode_stage
from recipes.preparation.feature_statistics import FIT, MERGED, Fitted, by_key, count_keys, last_tables, merge, write_keys
from recipes.preparation.moments import Moments
from recipes.preparation.plan import Plan, written
from recipes.preparation.read_stage import cleaning_of
from recipes.preparation.split_assignment import TRAIN
from recipes.preparation.split_stage import DECIDED
from recipes.preparation.tables import open_table
from recipes.records import key_index
from recipes.records.features import (
    COLUMN,
    INDEX,
    ONLINE,
    STATE,
    FeatureState,
    Scale,
    apply,
    category_of,
    clean_for,
    key_of,
    number_of,
    one_hot_name,
)
from recipes.records.fingerprint import canonical_line

FOLDER = "features"
"""Of the work: the files that the version is served by."""
MOST_CATEGORIES = 1000
BATCH = 1024
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
    ordered = sorted((key_index.hash_of(key), key) for key in keys)
    write_keys(table_file, ((hashed, key, Fitted(*keys[key]).to_json()) for hashed, key in ordered))
    facts = {
        "moments": {column: found.to_json() for column, found in moments.items()},
        "categories": {column: sorted(found) for column, found in categories.items()},
    }
    with written(facts_file) as part:
        part.write_text(json.dumps(facts))


def records(plan: Plan, index: int) -> Iterator[bytes]:
    for batch in (
        open_table(plan.place(encode_stage.STAGE, index, "arrow")).select(["record"]).to_batches(max_chunksize=BATCH)
    ):
        yield from batch.column("record").to_pylist()


def to_merge(plan: Plan) -> list[tuple[int, int]]:
    """The tables that `fit_all` reads, by their levels and numbers, as far as they are no range's and it is not done."""
    *keyed, state_file = files_of(plan)
    return [(level, number) for level, number in last_tables(plan) if level and keyed and not state_file.is_file()]


def fit_all(plan: Plan, state: FeatureState) -> None:
    """Put together what the ranges have, as the files of `FOLDER`. Holds a piece of each of up to `fan` tables in memory.

    Raises:
        BadConfiguration: a sum is beyond what a float can be.
    """
    *keyed, state_file = files_of(plan)
    if state_file.is_file():
        return
    # What a process that was killed had begun there would be published with the rest.
    shutil.rmtree(plan.work / FOLDER, ignore_errors=True)
    if keyed:
        online, index = keyed
        tables = [merge(plan, level, number) for level, number in last_tables(plan)]
        with written(online) as online_part, written(index) as index_part:
            key_index.write(online_part, index_part, count_keys(tables), online_lines(state, by_key(tables)))
    with written(state_file) as part:
        part.write_bytes(canonical_line(state.model_dump(mode="json")) + b"\n")
    shutil.rmtree(plan.work / MERGED, ignore_errors=True)


def state_of(plan: Plan) -> FeatureState:
    """What all ranges have of columns.

    Raises:
        BadConfiguration: no training record has a value in a column, or too many have different ones.
    """
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


def online_lines(state: FeatureState, keys: Iterable[tuple[int, str, list[bytes]]]) -> Iterator[tuple[int, bytes]]:
    """Of each key the features of its last record."""
    for hashed, key, found in keys:
        fitted = Fitted.together(found)
        wanted = state.features.aggregates.items()
        aggregates = {name: fitted.moments[column].of(function) for name, (column, function) in wanted}
        yield hashed, canonical_line({"key": key, COLUMN: apply(state, fitted.last, aggregates)})
