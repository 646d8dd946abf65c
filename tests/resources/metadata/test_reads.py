"""Rows that PostgreSQL reads for one page, by its own statistics.

A page of a history or a search reads only what it returns, by an index, however large the tables are. The statistics
reveal the actual plan, also that of a prepared statement.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from sqlalchemy import Connection, text

from resources.metadata.database import Database
from resources.metadata.field_rules import metric_point
from resources.metadata.filters.parser import parse_filter, parse_orders
from resources.metadata.tracking.run_search import RUN_GRAMMAR
from resources.metadata.tracking.tracking import Tracking
from tests.support.postgres_server import PostgresServer

pytestmark = pytest.mark.slow

POINTS, PAGE = 20_000, 50
RUNS_ELSEWHERE = 5000
COPIED = text("""
    INSERT INTO runs SELECT (jsonb_populate_record(runs, jsonb_build_object('id', 'else-' || n, 'experiment_id', :there))).*
    FROM runs, generate_series(1, :count) AS n WHERE id = 'r0'
""")
VALUES = (
    text("INSERT INTO params SELECT id, 'p', '1' FROM runs WHERE id LIKE 'else-%'"),
    text("""
        INSERT INTO latest_metrics (run_id, key, step, timestamp, value, is_nan)
        SELECT id, 'loss', 0, 0, 0.5, false FROM runs WHERE id LIKE 'else-%'
    """),
)
COUNTS = text("""
    SELECT relname, seq_scan, coalesce(idx_tup_fetch, 0) AS fetched, coalesce(idx_scan, 0) AS looked_up
    FROM pg_stat_xact_user_tables
""")


@dataclass(frozen=True)
class Counted:
    whole: int
    """Number of sequential scans of the table."""
    rows: int
    """Number of rows fetched by an index."""
    looked_up: int


@contextmanager
def counting(connection: Connection) -> Iterator[dict[str, Counted]]:
    """Count the reads of each table within the block.

    The totals may still contain earlier reads of this PostgreSQL process, so they are subtracted.
    """
    before = {row.relname: row for row in connection.execute(COUNTS)}
    found: dict[str, Counted] = {}
    yield found
    for row in connection.execute(COUNTS):
        old = before[row.relname]
        found[row.relname] = Counted(row.seq_scan - old.seq_scan, row.fetched - old.fetched, row.looked_up - old.looked_up)


@pytest.fixture(scope="module")
def tracking(postgres: PostgresServer) -> Iterator[Tracking]:
    """Create thirty runs of one experiment among thousands of another, and a long history."""
    database = Database(postgres.url(postgres.create()))
    tracking = Tracking(database)
    tracking.experiments.ensure_default()
    for number in range(30):
        tracking.runs.create(0, run_id=f"r{number}", start_time=number)
        loss = [metric_point("loss", number / 7, 0, 0)]
        tracking.run_data.log_batch(f"r{number}", loss, params=[("p", str(number % 3))])
    for start in range(0, POINTS, 1000):
        points = [metric_point("long", 0.5, step, step) for step in range(start, start + 1000)]
        tracking.run_data.log_batch("r0", points)
    there = tracking.experiments.create("elsewhere", "default").id
    with tracking.write() as writer:
        writer.execute(COPIED, {"there": there, "count": RUNS_ELSEWHERE})
        for statement in VALUES:
            writer.execute(statement)
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("ANALYZE"))
    yield tracking
    database.close()


@pytest.mark.parametrize("page", [1, 3], ids=["first", "later"])
def test_history_page_reads_only_the_rows_that_it_returns(tracking: Tracking, page: int) -> None:
    token = None
    for _ in range(page - 1):
        token = tracking.metrics.history("r0", "long", POINTS // 4, token).next_page_token
    with tracking.write() as connection, counting(connection) as found:
        points = tracking.metrics.history("r0", "long", PAGE, token, connection=connection).points
    assert len(points) == PAGE and points[0].step == (page - 1) * POINTS // 4
    for table in ("metrics", "latest_metrics"):
        assert found[table].whole == 0 and found[table].looked_up == 1, (table, found)
    assert found["metrics"].rows <= PAGE + 1, found


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "next"])
@pytest.mark.parametrize("filtered_by", ["params.p = '1'", "metrics.loss > 0.1", "params.p = '1' and metrics.loss > 0.1"])
def test_search_reads_only_its_own_experiment(tracking: Tracking, filtered_by: str, is_first: bool) -> None:
    orders = parse_orders(["metrics.loss DESC"], RUN_GRAMMAR)
    conditions = parse_filter(filtered_by, RUN_GRAMMAR)

    def page(token: str | None, connection: Connection | None = None) -> tuple[list[str], str | None]:
        found = tracking.run_search.search(
            [0], conditions=conditions, orders=orders, limit=4, page_token=token, connection=connection
        )
        return [logged.run.id for logged in found.runs], found.next_page_token

    token = None if is_first else page(None)[1]
    with tracking.write() as connection, counting(connection) as found:
        run_ids, _ = page(token, connection)
    assert len(run_ids) == 4
    for table in ("runs", "latest_metrics", "params"):
        assert found[table].whole == 0, (table, found)
        assert 0 < found[table].rows < 300, (table, found)
