"""Dagster's history on a real PostgreSQL survives loss of the state folder and restarts.

It is independent of our tables.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import psycopg
import pytest
import yaml
from dagster._core.remote_origin import InProcessCodeLocationOrigin, RemoteInstigatorOrigin, RemoteRepositoryOrigin
from dagster._core.scheduler.instigation import InstigatorState, InstigatorStatus, InstigatorType, SensorInstigatorData
from dagster._core.storage.schedules import ScheduleStorageSqlMetadata
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin
from sqlalchemy import Engine, event
from sqlalchemy.engine import make_url

from resources.installation import SOURCE
from resources.orchestration.instance import postgres_storage_config
from resources.orchestration.postgres_schema import dagster_database_url, locked_schema
from resources.orchestration.postgres_storage import create_tables, pooled_engine
from resources.settings.settings import Settings
from resources.stack.reset import empty_store
from tests.support.postgres_server import postgres, postgres_url

__all__ = ["postgres", "postgres_url"]
KEY = dg.AssetKey("made")
PREPARE = "from rich.console import Console; from resources.settings.settings import Settings; " + (
    "from resources.orchestration.instance import migrate_dagster; migrate_dagster(Settings.load(), Console())"
)
PASSWORD = "c4n4ry"


@dg.asset
def made() -> dg.MaterializeResult[None]:
    return dg.MaterializeResult(metadata={"rows": 7})


def looking(cursor: str) -> InstigatorState:
    location = InProcessCodeLocationOrigin(LoadableTargetOrigin(module_name="looks"))
    origin = RemoteInstigatorOrigin(RemoteRepositoryOrigin(location, "looks"), "looks")
    return InstigatorState(origin, InstigatorType.SENSOR, InstigatorStatus.RUNNING, SensorInstigatorData(cursor=cursor))


def prepare(home: Path, url: str) -> subprocess.Popen[str]:
    given = {**os.environ, "HANZO_ML_HOME": str(home), "HANZO_ML_DATABASE_URL": url, "DAGSTER_RUN_WORKERS": str(home)}
    command = [sys.executable, "-c", PREPARE]
    return subprocess.Popen(command, cwd=SOURCE, env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def tables(url: str, schema: str) -> set[str]:
    with psycopg.connect(url) as connection:
        found = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = %s", [schema]).fetchall()
    return {name for (name,) in found}


@pytest.mark.slow
def test_asset_graph_history_survives_loss_of_the_state_folder(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod dies with its state folder; two pods initialize the history concurrently."""
    url = make_url(postgres_url).set(password=PASSWORD).render_as_string(False)
    monkeypatch.setenv("HANZO_ML_DATABASE_URL", url)
    ours = tables(url, "public")
    pods = [prepare(tmp_path / name, url) for name in ("one", "two")]
    for pod in pods:
        said, _ = pod.communicate(timeout=120)
        assert pod.returncode == 0, said
    monkeypatch.setenv("DAGSTER_RUN_WORKERS", str(tmp_path))
    with dg.DagsterInstance.from_config(str(tmp_path / "one" / "dagster")) as instance:
        assert PASSWORD not in str(instance.get_ref())
        run = dg.materialize([made], instance=instance).run_id
        instance.add_dynamic_partitions("doors-runs", ["job-1"])
        instance.add_instigator_state(looking("7/9/1/0"))
    for folder in ("one", "two"):
        assert PASSWORD not in (tmp_path / folder / "dagster" / "dagster.yaml").read_text()
        shutil.rmtree(tmp_path / folder)

    pod = prepare(tmp_path / "one", url)
    said, _ = pod.communicate(timeout=120)
    assert pod.returncode == 0, said
    with dg.DagsterInstance.from_config(str(tmp_path / "one" / "dagster")) as instance:
        seen = instance.get_latest_materialization_event(KEY)
        assert seen is not None and seen.run_id == run
        assert instance.get_dynamic_partitions("doors-runs") == ["job-1"]
        (state,) = instance.all_instigator_state()
        assert state.instigator_data.cursor == "7/9/1/0"
        assert [entry.run_id for entry in instance.get_runs()] == [run]
    assert tables(url, "public") == ours, "Dagster's own are elsewhere"


@pytest.fixture
def settings(postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("HANZO_ML_HOME", str(tmp_path))
    monkeypatch.setenv("HANZO_ML_DATABASE_URL", postgres_url)
    return Settings.load()


@pytest.fixture
def address(settings: Settings) -> str:
    with locked_schema(settings) as schema:
        return dagster_database_url(settings, schema.name)


@pytest.fixture
def instance(settings: Settings, address: str) -> Iterator[dg.DagsterInstance]:
    create_tables(address)
    settings.dagster_home.mkdir()
    configuration = {"telemetry": {"enabled": False}, "storage": {"custom": postgres_storage_config("dagster_of_public")}}
    (settings.dagster_home / "dagster.yaml").write_text(yaml.safe_dump(configuration))
    with dg.DagsterInstance.from_config(str(settings.dagster_home)) as opened:
        yield opened
    pooled_engine.cache_clear()


def test_interrupted_creation_of_tables_leaves_none(
    address: str, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dagster's own way left the tables created so far and then treated them as complete."""

    def killed(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(ScheduleStorageSqlMetadata, "create_all", killed)
        create_tables(address)
    assert tables(postgres_url, "dagster_of_public") == set()
    create_tables(address)
    assert {"runs", "event_logs", "instigators", "alembic_version"} <= tables(postgres_url, "dagster_of_public")


def test_storage_uses_few_connections_and_survives_their_loss(instance: dg.DagsterInstance, postgres_url: str) -> None:
    opened: list[object] = []

    def note(connection: object, record: object) -> None:
        opened.append(connection)

    def work() -> None:
        dg.materialize([made], instance=instance)
        for _ in range(10):
            assert instance.get_runs() and instance.get_latest_materialization_event(KEY)

    event.listen(Engine, "connect", note)
    try:
        work()
        assert len(opened) <= 3  # Dagster's own storage opens one for each query
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            others = "datname = current_database() AND pid <> pg_backend_pid()"
            connection.execute(f"SELECT pg_terminate_backend(pid, 9000) FROM pg_stat_activity WHERE {others}".encode())
        work()
    finally:
        event.remove(Engine, "connect", note)
    assert len(instance.get_runs()) == 2


def test_webserver_statement_beyond_its_timeout_is_cancelled(instance: dg.DagsterInstance) -> None:
    instance.optimize_for_webserver(statement_timeout=50, pool_recycle=3600, max_overflow=20)
    with instance.run_storage.connect() as connection, pytest.raises(Exception, match="statement timeout"):  # type: ignore[attr-defined]
        connection.exec_driver_sql("SELECT pg_sleep(5)")
    assert instance.get_runs() == []


def test_emptying_the_store_leaves_what_dagster_wrote_of_its_runs(instance: dg.DagsterInstance, settings: Settings) -> None:
    dg.materialize([made], instance=instance)
    empty_store(settings)
    assert len(instance.get_runs()) == 1
