"""Load runs with what they logged: two raw driver statements per few hundred runs.

A search page has thousands of small rows, for which SQLAlchemy's overhead exceeds the database's work. Therefore the ids are
bound as one value, so that the text of a statement never changes; pairs are returned as one JSON object per run instead of a
row each; and inputs and models, which few runs have, are looked up only for runs that the same statement reports to have
them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

import msgspec
from sqlalchemy import Connection

from resources.metadata.field_rules import MetricPoint
from resources.metadata.tracking.run_inputs import DatasetInput, RunModel, load_inputs, load_run_models
from resources.metadata.tracking.run_states import Run
from resources.metadata.transactions import fetch_rows

CHUNK = 500
"""Runs whose details are read by one statement: SQLite allows at most 32,766 variables, and results are held twice."""

_METRICS = """SELECT t.run_id, t.key, CASE WHEN NOT t.is_nan THEN t.value END, t.step, t.timestamp
    FROM latest_metrics AS t WHERE t.run_id {among}"""
# Metrics are read separately: SQLite writes doubles in JSON with 15 digits, and PostgreSQL's JSON is slower than rows.
_OTHERS = """SELECT wanted.place,
    (SELECT CAST({pairs}(t.key, t.value) AS TEXT) FROM params AS t WHERE t.run_id = wanted.run_id),
    (SELECT CAST({pairs}(t.key, t.value) AS TEXT) FROM run_tags AS t WHERE t.run_id = wanted.run_id),
    EXISTS (SELECT 1 FROM run_inputs AS t WHERE t.run_id = wanted.run_id),
    EXISTS (SELECT 1 FROM run_models AS t WHERE t.run_id = wanted.run_id)
    FROM {wanted}"""
_WORDS = {
    "sqlite": {
        "among": "IN (SELECT value FROM json_each(?))",
        "wanted": "(SELECT key AS place, value AS run_id FROM json_each(?)) AS wanted",
        "pairs": "json_group_object",
    },
    # An array is looked up in a single index scan; a join would start a new scan for each run.
    "postgresql": {
        "among": "= ANY(ARRAY(SELECT json_array_elements_text(%s)))",
        "wanted": """(SELECT number - 1 AS place, run_id
            FROM json_array_elements_text(%s) WITH ORDINALITY AS t (run_id, number)) AS wanted""",
        "pairs": "json_object_agg",
    },
}
_STATEMENTS = {dialect: (_METRICS.format(**words), _OTHERS.format(**words)) for dialect, words in _WORDS.items()}

_pairs = msgspec.json.Decoder(dict[str, str])
_point = tuple.__new__
"""Creates a named tuple in half the time of calling its class."""


@dataclass(frozen=True)
class LoggedRun:
    """A run with what it logged, each kind sorted by key."""

    run: Run
    metrics: Sequence[MetricPoint]
    params: Mapping[str, str]
    tags: Mapping[str, str]
    inputs: Sequence[DatasetInput]
    models: Sequence[RunModel]


def load_logged(reader: Connection, found: Sequence[Run]) -> list[LoggedRun]:
    """Load what runs logged, in the order of the runs."""
    return [logged for start in range(0, len(found), CHUNK) for logged in _load(reader, found[start : start + CHUNK])]


def _load(reader: Connection, found: Sequence[Run]) -> list[LoggedRun]:
    metrics_statement, others_statement = _STATEMENTS[reader.dialect.name]
    ids = [run.id for run in found]
    bound = [msgspec.json.encode(ids).decode()]
    metrics: dict[str, list[MetricPoint]] = {run_id: [] for run_id in ids}
    for run_id, key, value, step, timestamp in fetch_rows(reader, metrics_statement, bound):
        number, is_nan = (0.0, True) if value is None else (value, False)
        metrics[run_id].append(_point(MetricPoint, (key, number, step, timestamp, is_nan, "", "", "")))
    others = fetch_rows(reader, others_statement, bound)
    others.sort(key=itemgetter(0))
    with_inputs = [ids[place] for place, _, _, is_present, _ in others if is_present]
    with_models = [ids[place] for place, _, _, _, is_present in others if is_present]
    inputs = load_inputs(reader, with_inputs) if with_inputs else {}
    models = load_run_models(reader, with_models) if with_models else {}
    return [
        LoggedRun(
            run,
            sorted(metrics[run.id]),
            _sorted_pairs(params),
            _sorted_pairs(tags),
            inputs.get(run.id, []),
            models.get(run.id, []),
        )
        for run, (_, params, tags, _, _) in zip(found, others, strict=True)
    ]


def _sorted_pairs(text: str | None) -> dict[str, str]:
    if text is None:
        return {}
    pairs = _pairs.decode(text)
    keys = sorted(pairs)
    # Usually they are sorted already.
    return pairs if keys == list(pairs) else {key: pairs[key] for key in keys}
