"""A server on PostgreSQL updates planner statistics of growing tables by itself."""

import time
from pathlib import Path

import httpx
import pytest
from sqlalchemy import text

from resources.metadata.database import Database
from tests.support.postgres_server import postgres, postgres_url
from tests.support.server_process import ServerProcess

__all__ = ["postgres", "postgres_url"]
LONG = 60.0

pytestmark = pytest.mark.slow


def test_tables_that_grow_are_analyzed_while_the_server_runs(tmp_path: Path, postgres_url: str) -> None:
    database = Database(postgres_url)
    analyzed = text("SELECT analyze_count FROM pg_stat_user_tables WHERE relname = 'latest_metrics'")
    metrics = [{"key": f"m{number}", "value": 0.5, "timestamp": 0, "step": 0} for number in range(1000)]
    with ServerProcess(tmp_path, {"HANZO_ML_DATABASE_URL": postgres_url}) as server:
        for _ in range(2):
            run = httpx.post(f"{server.url}/api/2.0/mlflow/runs/create", json={"experiment_id": "0"}).json()["run"]
            body = {"run_id": run["info"]["run_id"], "metrics": metrics}
            httpx.post(f"{server.url}/api/2.0/mlflow/runs/log-batch", json=body).raise_for_status()
        end = time.monotonic() + LONG
        count = 0
        while not count and time.monotonic() < end:
            time.sleep(0.2)
            with database.read() as connection:
                count = connection.execute(analyzed).scalar_one()
    assert count
    database.close()
