"""The chain with a cluster's database and store survives losing database and pod.

The pod dies with everything in it.
"""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg
import pytest

from sensors.decisions.retry_policy import RETRIED_RUN_TAG
from tests.end_to_end.conftest import Baseline
from tests.end_to_end.local_stack import LocalStack, wait_until
from tests.end_to_end.process_killer import kill
from tests.support.postgres_server import NoPostgres, PostgresServer

NAME = "doors-of-a-pod"
AWAY_SECONDS = 20
"""Longer than Dagster tries to connect."""


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    """Start a separate database server, which may be killed."""
    try:
        own = PostgresServer(fsync=True)
    except NoPostgres as problem:
        pytest.skip(str(problem))
    yield own
    own.stop()


@pytest.fixture
def pod(server: PostgresServer, tmp_path: Path) -> Iterator[LocalStack]:
    (tmp_path / "store").mkdir()
    url = server.url(server.create())
    running = LocalStack(tmp_path / "pod", settings={"HANZO_ML_DATABASE_URL": url}, store=tmp_path / "store")
    running.hanzo_ml("up")
    yield running
    running.hanzo_ml("down", check=False)


def dies(pod: LocalStack) -> None:
    """Kill every process at once, and delete the folder with all locks, logs and jobs."""
    processes = pod.processes()
    for process in processes:
        kill(process)
    psutil.wait_procs(processes, timeout=60)
    shutil.rmtree(pod.home)


def rows(pod: LocalStack, query: str) -> set[str]:
    with psycopg.connect(pod.settings["HANZO_ML_DATABASE_URL"]) as connection:
        return {str(row[0]) for row in connection.execute(query.encode()).fetchall()}


@pytest.mark.slow
def test_new_pod_resumes_job_and_dagster_history_of_a_dead_pod(
    pod: LocalStack, server: PostgresServer, baseline: Baseline, raw_data: Path, tmp_path: Path
) -> None:
    pod.hanzo_ml("dataset", "create", "--name", "colours", "--path", str(raw_data))
    job = pod.submit(NAME, "colours@1", baseline.parameters)
    pod.wait_for_step(job, 10)
    with pod.standing_still(job):
        server.kill()
        time.sleep(AWAY_SECONDS)
        server.start()
    pod.wait_for_step(job, 16)
    with pod.standing_still(job):
        assert "not running" not in pod.hanzo_ml("status").stdout
        runs = rows(pod, "SELECT run_id FROM dagster_of_public.runs")
        assert not (pod.home / "dagster" / "history").exists()
    dies(pod)

    pod.hanzo_ml("up")
    pod.wait_for("job.completed", job)
    pod.wait_for("model.exported", NAME)
    pod.hanzo_ml("model", "promote", "--name", NAME, "--version", "1", "--stage", "production")
    pod.wait_for("deployment.serving", NAME)
    assert pod.losses(job) == baseline.losses
    assert pod.adapter_sha256(job) == baseline.adapter_sha256
    assert [version["version"] for version in pod.get(f"/v1/models/{NAME}/versions")["versions"]] == [1]
    for event, key in (("job.completed", job), ("model.registered", NAME), ("model.exported", NAME)):
        assert len(pod.events(event, key=key)) == 1, event
    assert runs < rows(pod, "SELECT run_id FROM dagster_of_public.runs")
    assert runs & rows(pod, f"SELECT value FROM dagster_of_public.run_tags WHERE key = '{RETRIED_RUN_TAG}'"), (
        "it is gone on with"
    )
    ended = "SELECT run_id FROM dagster_of_public.runs WHERE status IN ('STARTED', 'STARTING', 'QUEUED')"
    wait_until("the end of all runs", lambda: not rows(pod, ended))
