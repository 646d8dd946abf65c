"""Write logged rows to PostgreSQL: arrays instead of rows, in pipelined statements.

Pipelined, because waiting for a result costs as much as a statement. A group first locks the rows of its runs in sorted
order: other writers to the same runs wait, what was read stays valid until the commit, and groups cannot deadlock.
"""

import struct
from collections.abc import Sequence

from sqlalchemy import PoolProxiedConnection

from resources.metadata.postgresql_pipeline import Pipeline, number_array, text_array
from resources.metadata.writes.write_decisions import Changes, Key, KnownRows, RunRow, Series, Value, WantedRows

COPY_FROM = 50
"""Minimum number of new points for COPY, which is faster than an INSERT with a look-up per row, but costs a round trip."""

STATEMENTS = {
    b"begin": b"BEGIN",
    b"commit": b"COMMIT",
    b"runs": b"SELECT id, lifecycle_stage, organization FROM runs WHERE id = ANY($1) ORDER BY id FOR NO KEY UPDATE",
    b"params": b"""SELECT t.run_id, t.key, t.value
        FROM unnest($1::text[], $2::text[]) AS wanted (run_id, key) JOIN params AS t USING (run_id, key)""",
    b"series": b"""SELECT t.run_id, t.key, t.id, t.step, t.timestamp, t.value, t.is_nan
        FROM unnest($1::text[], $2::text[]) AS wanted (run_id, key) JOIN latest_metrics AS t USING (run_id, key)""",
    b"new_series": b"""INSERT INTO latest_metrics (run_id, key, step, timestamp, value, is_nan)
        SELECT * FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[], $5::float8[], $6::bool[])
        RETURNING run_id, key, id""",
    b"revised": b"UPDATE runs SET revision = revision + 1 WHERE id = ANY($1)",
    b"newest": b"""UPDATE latest_metrics AS t
        SET step = new.step, timestamp = new.timestamp, value = new.value, is_nan = new.is_nan
        FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::float8[], $5::bool[])
        AS new (id, step, timestamp, value, is_nan) WHERE t.id = new.id""",
    b"points": b"""INSERT INTO metrics (series, step, timestamp, value, is_nan)
        SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::float8[], $5::bool[]) ON CONFLICT DO NOTHING""",
    b"new_params": b"""INSERT INTO params (run_id, key, value) SELECT * FROM unnest($1::text[], $2::text[], $3::text[])""",
    b"tags": b"""INSERT INTO run_tags (run_id, key, value) SELECT * FROM unnest($1::text[], $2::text[], $3::text[])
        ON CONFLICT (run_id, key) DO UPDATE SET value = excluded.value""",
    b"names": b"""UPDATE runs SET name = new.name FROM unnest($1::text[], $2::text[]) AS new (id, name)
        WHERE runs.id = new.id""",
    b"tallies": b"""INSERT INTO call_tallies (id, call, number, taken_at)
        SELECT *, 0 FROM unnest($1::text[], $2::text[], $3::bigint[])
        ON CONFLICT (id) DO UPDATE SET number = call_tallies.number + excluded.number""",
}

COPY = "COPY metrics (series, step, timestamp, value, is_nan) FROM STDIN (FORMAT BINARY)"
COPY_HEAD = b"PGCOPY\n\xff\r\n\x00" + bytes(8)
COPY_END = b"\xff\xff"
copy_row = struct.Struct("!hiqiqiqidi?").pack

Point = tuple[int, int, int, float, bool]
"""A row of `metrics`."""


def begin(pooled: PoolProxiedConnection) -> None:
    """Do nothing: the transaction begins together with `read`."""


def read(pooled: PoolProxiedConnection, wanted: WantedRows) -> KnownRows:
    """Return the existing rows, and lock those of the runs."""
    pipeline = Pipeline(pooled, STATEMENTS)
    pipeline.add(b"runs", (text_array(wanted.runs),))
    if wanted.params:
        pipeline.add(b"params", _texts(wanted.params))
    if wanted.series:
        pipeline.add(b"series", _texts(wanted.series))
    answers = pipeline.run()
    return KnownRows(
        {id.decode(): RunRow(stage.decode(), organization.decode()) for id, stage, organization in answers[b"runs"]},
        {(run_id.decode(), key.decode()): value.decode() for run_id, key, value in answers.get(b"params", ())},
        {(row[0].decode(), row[1].decode()): _series(row) for row in answers.get(b"series", ())},
    )


def write(pooled: PoolProxiedConnection, known: KnownRows, changes: Changes, commit: bool) -> None:
    """Write the rows, and commit in the same round trip if `commit`."""
    pipeline = Pipeline(pooled, STATEMENTS)
    ids = {name: series.id for name, series in known.series.items()}
    new = [(*name, *value) for name, value in changes.newest.items() if name not in ids]
    if new:
        pipeline.add(b"new_series", (*_texts([row[:2] for row in new]), *_numbers([row[2:] for row in new])))
        rows = pipeline.run()[b"new_series"]
        ids.update({(run_id.decode(), key.decode()): int(number) for run_id, key, number in rows})
    moved = [(ids[name], *value) for name, value in changes.newest.items() if name in known.series]
    other = _points(changes.other, ids)
    if sum(map(len, changes.fresh.values())) >= COPY_FROM:
        _copy(pipeline, changes.fresh, ids)
    else:
        other += _points(changes.fresh, ids)
    if changes.runs:
        pipeline.add(b"revised", (text_array(changes.runs),))
    if moved:
        pipeline.add(b"newest", _numbers(moved))
    if other:
        pipeline.add(b"points", _numbers(other))
    if changes.params:
        pipeline.add(b"new_params", _texts([(*name, value) for name, value in changes.params.items()]))
    if changes.tags:
        pipeline.add(b"tags", _texts([(*name, value) for name, value in changes.tags.items()]))
    if changes.names:
        pipeline.add(b"names", _texts(list(changes.names.items())))
    if changes.tallies:
        counted = sorted(changes.tallies.items())
        columns = _texts([tally for tally, _ in counted])
        pipeline.add(b"tallies", (*columns, number_array([number for _, number in counted])))
    if commit:
        pipeline.add(b"commit")
    pipeline.run()


def _copy(pipeline: Pipeline, points: dict[Key, dict[Value, None]], ids: dict[Key, int]) -> None:
    rows = [
        copy_row(5, 8, ids[name], 8, step, 8, timestamp, 8, value, 1, is_nan)
        for name, values in points.items()
        for step, timestamp, value, is_nan in values
    ]
    with pipeline.driver.cursor().copy(COPY) as copy:
        copy.write(COPY_HEAD + b"".join(rows) + COPY_END)


def _points(points: dict[Key, dict[Value, None]], ids: dict[Key, int]) -> list[Point]:
    return [(ids[name], *value) for name, values in points.items() for value in values]


def _series(row: Sequence[bytes]) -> Series:
    return Series(int(row[2]), (int(row[3]), int(row[4]), float(row[5]), row[6] == b"t"))


def _texts(rows: Sequence[Sequence[str]]) -> list[bytes]:
    return [text_array(column) for column in zip(*rows, strict=True)]


def _numbers(rows: Sequence[Sequence[float]]) -> list[bytes]:
    return [number_array(column) for column in zip(*rows, strict=True)]
