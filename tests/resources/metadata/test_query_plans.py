"""PostgreSQL uses indexes on small unanalyzed tables, and grown tables are analyzed."""

import pytest
from sqlalchemy import text

from resources.metadata.database import Database, analyze_grown_tables
from resources.metadata.field_rules import metric_point
from resources.metadata.tracking.tracking import Tracking

SCANS = text("SELECT relname, seq_scan FROM pg_stat_xact_user_tables WHERE relname IN ('runs', 'latest_metrics')")

pytestmark = pytest.mark.slow


def test_logging_a_metric_scans_no_whole_table(postgres_url: str) -> None:
    database = Database(postgres_url)
    tracking = Tracking(database)
    tracking.experiments.ensure_default()
    points = [metric_point(f"m{number}", 0.5, 0, 0) for number in range(10)]
    made = [tracking.runs.create(0) for _ in range(20)]
    for run in made:
        tracking.run_data.log_batch(run.id, points)
    with tracking.write() as writer:
        tracking.run_data.log_metric(made[0].id, metric_point("m0", 0.5, 1, 1), connection=writer)
        scans = {row.relname: row.seq_scan for row in writer.execute(SCANS)}
    assert scans == {"runs": 0, "latest_metrics": 0}
    database.close()


def test_grown_table_is_analyzed_once(postgres_url: str) -> None:
    database = Database(postgres_url)
    tracking = Tracking(database)
    tracking.experiments.ensure_default()
    run = tracking.runs.create(0)
    for start in range(0, 2000, 100):
        tracking.run_data.log_batch(run.id, params=[(f"p{number}", "v") for number in range(start, start + 100)])
    with database.read() as connection:
        connection.execute(text("SELECT pg_stat_force_next_flush()"))
    assert "params" in analyze_grown_tables(database)
    with database.read() as connection:
        known = connection.execute(text("SELECT reltuples FROM pg_class WHERE relname = 'params'")).scalar_one()
    assert known == 2000
    assert "params" not in analyze_grown_tables(database)
    database.close()
