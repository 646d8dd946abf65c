"""PostgreSQL address and schema of Dagster's history on a cluster, and where they are decided."""

import threading
import time
from pathlib import Path
from typing import Any

import psycopg
import psycopg.sql
import pytest
from rich.console import Console
from sqlalchemy.engine import make_url

from recipes.contracts.job import BadConfiguration
from resources.orchestration import instance
from resources.orchestration.instance import migrate_dagster
from resources.orchestration.postgres_schema import check_search_path, dagster_database_url, locked_schema
from resources.settings.settings import Settings
from tests.support.postgres_server import PostgresServer, postgres, postgres_url

__all__ = ["postgres", "postgres_url"]
ONLY = '-csearch_path="dagster_of_public"'


def settings_of(url: str, home: Path = Path("/nowhere"), **more: str) -> Settings:
    return Settings.load({"HANZO_ML_HOME": str(home), "HANZO_ML_DATABASE_URL": url, **more})


def driver_arguments(address: str) -> dict[str, Any]:
    """Return the arguments that psycopg 2 is called with."""
    url = make_url(address)
    assert url.drivername == "postgresql+psycopg2"
    _, arguments = url.get_dialect()().create_connect_args(url)
    return dict(arguments)


@pytest.mark.parametrize(
    ("url", "has"),
    [
        (
            "postgresql://ann:p%40s%2Fs%25w%3Ard@db:5433/ml?sslmode=verify-full&sslrootcert=/etc/ca.pem",
            {"user": "ann", "password": "p@s/s%w:rd", "host": "db", "port": 5433, "dbname": "ml"}
            | {"sslmode": "verify-full", "sslrootcert": "/etc/ca.pem", "options": ONLY},
        ),
        ("postgresql+psycopg://ann@/ml?host=/run/a%20socket", {"user": "ann", "host": "/run/a socket", "dbname": "ml"}),
        ("postgresql://u@/ml?host=one:5432&host=two:5433", {"host": "one,two", "port": "5432,5433"}),
        ("postgresql://h/ml?options=-cwork_mem%3D64MB%20-cjit%3Doff", {"options": f"-cwork_mem=64MB -cjit=off {ONLY}"}),
        ("postgresql://h/ml?options=-csearch_path%3Dteam", {"options": f"-csearch_path=team {ONLY}"}),
        ("postgresql://h/ml?user=ann&password=p%26w", {"user": "ann", "password": "p&w"}),
        ("postgresql://h/ml", {"connect_timeout": "7", "tcp_user_timeout": "7000", "client_encoding": "utf8"}),
        ("postgresql://h/ml?connect_timeout=3", {"connect_timeout": "3"}),
    ],
)
def test_dagster_database_url_keeps_the_options_of_the_metadata_url(url: str, has: dict[str, Any]) -> None:
    settings = settings_of(url, HANZO_ML_DATABASE_CONNECT_SECONDS="7")
    found = driver_arguments(dagster_database_url(settings, "dagster_of_public"))
    assert {name: found.get(name) for name in has} == has


def test_dagster_database_url_of_sqlite_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match="hanzo-ml up"):
        dagster_database_url(Settings.load({"HANZO_ML_HOME": str(tmp_path)}), "dagster_of_public")


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Record the Dagster commands instead of running them."""
    said: list[tuple[str, ...]] = []
    monkeypatch.setattr(instance, "run_instance_command", lambda _, *arguments, home=None: said.append(arguments))
    return said


def storage_in(home: Path) -> str:
    text = (home / "dagster" / "dagster.yaml").read_text()
    return "OwnSchemaStorage" if "OwnSchemaStorage" in text else "KeptSqliteStorage"


def test_a_history_that_was_begun_in_the_state_folder_stays_there(
    tmp_path: Path, commands: list[tuple[str, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    migrate_dagster(Settings.load({"HANZO_ML_HOME": str(tmp_path)}), Console())
    (tmp_path / "dagster" / "history").mkdir()  # as Dagster does
    assert capsys.readouterr().out == ""
    migrate_dagster(settings_of("postgresql://nobody@127.0.0.1:1/ml", tmp_path), Console())
    assert storage_in(tmp_path) == "KeptSqliteStorage"
    (line,) = capsys.readouterr().out.splitlines()
    assert str(tmp_path / "dagster" / "history") in line and "PostgreSQL" in line


def test_history_is_prepared_once_per_database_independent_of_the_state_folder(
    postgres: PostgresServer, postgres_url: str, tmp_path: Path, commands: list[tuple[str, ...]]
) -> None:
    migrate_dagster(settings_of(postgres_url, tmp_path / "one", HANZO_ML_SCHEDULER_JOBS_AT_ONCE="2"), Console())
    assert storage_in(tmp_path / "one") == "OwnSchemaStorage"
    assert commands == [("migrate",), ("reindex",), ("concurrency", "set", "gpu", "2")]
    for folder in ("one", "two"):
        migrate_dagster(settings_of(postgres_url, tmp_path / folder, HANZO_ML_SCHEDULER_JOBS_AT_ONCE="2"), Console())
    assert len(commands) == 3
    other = postgres.create()
    try:
        migrate_dagster(settings_of(postgres.url(other), tmp_path / "one"), Console())
    finally:
        postgres.drop(other)
    assert commands[3:] == [("migrate",), ("reindex",)]


def test_interrupted_preparation_of_the_history_is_repeated(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, home: object) -> None:
        raise BadConfiguration("no disk")

    said: list[tuple[str, ...]] = []
    settings = settings_of(postgres_url, tmp_path)
    monkeypatch.setattr(instance, "run_instance_command", fail)
    with pytest.raises(BadConfiguration, match="no disk"):
        migrate_dagster(settings, Console())
    monkeypatch.setattr(instance, "run_instance_command", lambda _, *arguments, home=None: said.append(arguments))
    migrate_dagster(settings, Console())
    assert said == [("migrate",), ("reindex",)]


@pytest.mark.parametrize("theirs", ["team", 'te"am \\ one'])
def test_installations_that_share_a_database_share_no_history(postgres_url: str, theirs: str) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(psycopg.sql.SQL("CREATE SCHEMA {}").format(psycopg.sql.Identifier(theirs)))
        quoted = psycopg.sql.Identifier(theirs).as_string(connection)
    escaped = quoted.replace("\\", "\\\\").replace(" ", "\\ ")
    there = make_url(postgres_url).update_query_dict({"options": f"-csearch_path={escaped}"})
    names = []
    for url in (postgres_url, there.render_as_string(False)):
        with locked_schema(settings_of(url)) as schema:
            names.append(schema.name)
    assert names == ["dagster_of_public", f"dagster_of_{theirs}"]


def test_missing_permission_to_create_a_schema_is_rejected_with_the_statement(
    postgres: PostgresServer, postgres_url: str
) -> None:
    name = f"u{make_url(postgres_url).database}"
    postgres.execute(f"CREATE ROLE {name} LOGIN")
    poor = settings_of(make_url(postgres_url).set(username=name).render_as_string(False))
    with pytest.raises(BadConfiguration, match="CREATE SCHEMA dagster_of_public AUTHORIZATION"), locked_schema(poor):
        pass
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA dagster_of_public AUTHORIZATION {name}".encode())
    with locked_schema(poor) as schema:
        schema.write({"dagster": "it's 1"})
        assert schema.read() == {"dagster": "it's 1"}


def test_pooler_that_drops_connection_options_is_refused(postgres_url: str) -> None:
    address = make_url(dagster_database_url(settings_of(postgres_url), "dagster_of_public")).difference_update_query(
        ["options"]
    )
    with pytest.raises(BadConfiguration, match="drops `options`"):
        check_search_path(address.render_as_string(False), "dagster_of_public")


def test_waiting_for_the_schema_lock_does_not_block_a_concurrent_index_build(postgres_url: str) -> None:
    """Dagster's migrations build indexes this way.

    Regression: with a transaction-level lock `up` waited for itself.
    """
    settings = settings_of(postgres_url)
    names: list[str] = []

    def wait() -> None:
        with locked_schema(settings) as schema:
            names.append(schema.name)

    waiting = threading.Thread(target=wait)
    with locked_schema(settings) as schema, psycopg.connect(postgres_url, autocommit=True) as connection:
        schema.read()
        waiting.start()
        asked = "SELECT 1 FROM pg_stat_activity WHERE query LIKE '%advisory%lock%' AND pid <> pg_backend_pid()"
        while not connection.execute(f"{asked} AND datname = current_database()".encode()).fetchone():
            time.sleep(0.01)
        connection.execute("CREATE TABLE dagster_of_public.indexed (id int)")
        connection.execute("SET statement_timeout = '10s'")
        connection.execute("CREATE INDEX CONCURRENTLY ON dagster_of_public.indexed (id)")
        assert names == []
    waiting.join()
    assert names == ["dagster_of_public"]
