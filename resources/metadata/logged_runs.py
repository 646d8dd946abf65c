"""Runs with what they logged: two statements for a few hundred runs, given to the driver itself.

A page of a search is thousands of small rows, and SQLAlchemy's own work for each costs more than the database's. So the ids
are bound as one value, which keeps every statement the same text; pairs come as one JSON object for each run instead of a
row each; and what few runs have (inputs, models) is looked up only for those that the same statement names.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import Connection

from resources.metadata.inputs import DatasetInput, load_inputs
from resources.metadata.run_models import RunModel, load_run_models
from resources.metadata.run_states import Run
from resources.metadata.tracking_rules import MetricPoint
from resources.metadata.transactions import driver_errors

CHUNK = 500
"""Rows whose details are read by one statement: SQLite takes at most 32,766 variables, and what is read is held twice."""

_METRICS = "SELECT run_id, key, value, step, timestamp, is_nan FROM latest_metrics WHERE run_id {chosen}"
# Metrics have no part in this: SQLite writes doubles in JSON with 15 digits.
_OTHERS = """SELECT 'params', run_id, CAST({pairs}(key, value) AS TEXT) FROM params WHERE run_id {chosen} GROUP BY run_id
    UNION ALL SELECT 'tags', run_id, CAST({pairs}(key, value) AS TEXT) FROM run_tags WHERE run_id {chosen} GROUP BY run_id
    UNION ALL SELECT 'inputs', run_id, '{{}}' FROM run_inputs WHERE run_id {chosen} GROUP BY run_id
    UNION ALL SELECT 'models', run_id, '{{}}' FROM run_models WHERE run_id {chosen} GROUP BY run_id"""
_WORDS = {
    "sqlite": {"chosen": "IN (SELECT value FROM json_each(:ids))", "pairs": "json_group_object"},
    "postgresql": {"chosen": "= ANY(%(ids)s)", "pairs": "json_object_agg"},
}
_STATEMENTS = {dialect: (_METRICS.format(**words), _OTHERS.format(**words)) for dialect, words in _WORDS.items()}

_pairs = msgspec.json.Decoder(dict[str, str])
_point = tuple.__new__
"""Makes a named tuple in half the time that its own name takes."""


@dataclass(frozen=True)
class LoggedRun:
    """A run with what it logged, each kind in the order of its keys."""

    run: Run
    metrics: Sequence[MetricPoint]
    params: Mapping[str, str]
    tags: Mapping[str, str]
    inputs: Sequence[DatasetInput]
    models: Sequence[RunModel]


def load_logged(reader: Connection, found: Sequence[Run]) -> list[LoggedRun]:
    """What runs logged, in their order."""
    return [logged for start in range(0, len(found), CHUNK) for logged in _load(reader, found[start : start + CHUNK])]


def _load(reader: Connection, found: Sequence[Run]) -> list[LoggedRun]:
    of_metrics, of_others = _STATEMENTS[reader.dialect.name]
    ids = [run.id for run in found]
    metrics: dict[str, list[MetricPoint]] = {run_id: [] for run_id in ids}
    for run_id, key, value, step, timestamp, is_nan in _rows(reader, of_metrics, ids):
        metrics[run_id].append(_point(MetricPoint, (key, value, step, timestamp, bool(is_nan), "", "", "")))
    others: dict[str, dict[str, str]] = {"params": {}, "tags": {}, "inputs": {}, "models": {}}
    for kind, run_id, text in _rows(reader, of_others, ids):
        others[kind][run_id] = text
    inputs = load_inputs(reader, list(others["inputs"])) if others["inputs"] else {}
    models = load_run_models(reader, list(others["models"])) if others["models"] else {}
    return [
        LoggedRun(
            run,
            sorted(metrics[run.id]),
            _sorted_pairs(others["params"].get(run.id)),
            _sorted_pairs(others["tags"].get(run.id)),
            inputs.get(run.id, []),
            models.get(run.id, []),
        )
        for run in found
    ]


def _sorted_pairs(text: str | None) -> dict[str, str]:
    if text is None:
        return {}
    pairs = _pairs.decode(text)
    keys = sorted(pairs)
    # As a rule they come so already.
    return pairs if keys == list(pairs) else {key: pairs[key] for key in keys}


def _rows(reader: Connection, statement: str, ids: list[str]) -> list[tuple[Any, ...]]:
    """All rows at once: fetched one by one, they cost more than the search itself."""
    driver: Any = reader.connection.driver_connection
    found: list[tuple[Any, ...]]
    with driver_errors(reader.dialect):
        if reader.dialect.name == "postgresql":
            found = driver.cursor(binary=True).execute(statement, {"ids": ids}).fetchall()
        else:
            found = driver.execute(statement, {"ids": msgspec.json.encode(ids).decode()}).fetchall()
    return found
