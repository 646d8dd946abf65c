"""A server on a database without tables or with older ones, and migration commands."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import alembic.command
import httpx
import pytest
from alembic.config import Config

from recipes.contracts.job import EXIT_BAD_CONFIGURATION
from resources.metadata.database import Database
from resources.metadata.migrate import MIGRATIONS, Revision, read_revision
from resources.settings.settings import Settings
from tests.api.conftest import answering
from tests.support.free_ports import free_port
from tests.support.postgres_server import PostgresServer, postgres
from tests.support.server_process import REPOSITORY, STARTS_WITHIN, environment

__all__ = ["postgres"]

HANZO_ML = (sys.executable, "-c", "from hanzo_ml.cli import main; main()")


def surroundings(home: Path, port: int, **extra: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    return environment(home, port, {"PYTHONPATH": path, **extra})


@contextmanager
def serving(home: Path, **extra: str) -> Iterator[tuple[httpx.Client, "subprocess.Popen[str]"]]:
    """Run `hanzo-ml server run` in a folder that contains its own `api`."""
    (home / "api").mkdir(parents=True, exist_ok=True)
    (home / "api" / "__init__.py").write_text("raise SystemExit('another api')")
    port = free_port()
    process = subprocess.Popen(
        [*HANZO_ML, "server", "run"], cwd=home, env=surroundings(home, port, **extra), stderr=subprocess.PIPE, text=True
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            until_ready(client, process)
            yield client, process
    finally:
        process.kill()
        process.communicate()


def until_ready(client: httpx.Client, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + STARTS_WITHIN
    while True:
        try:
            if client.get("/ready").status_code == 200:
                return
        except httpx.TransportError:
            assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_ctrl_c_stops_the_server_without_traceback(tmp_path: Path) -> None:
    with serving(tmp_path) as (_, process):
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=STARTS_WITHIN)
    assert process.returncode == 130
    assert "Traceback" not in stderr and "KeyboardInterrupt" not in stderr


def made(client: httpx.Client) -> str:
    answer = client.post("/api/2.0/mlflow/experiments/create", json={"name": uuid4().hex})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["experiment_id"])


def put_back(url: str) -> None:
    """Reset a database to the tables of the first release."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    with Database(url).write() as connection:
        config.attributes["connection"] = connection
        alembic.command.downgrade(config, "0001")


def test_server_run_initializes_a_new_store_and_stops_on_sigterm(tmp_path: Path) -> None:
    with serving(tmp_path / "home") as (client, process):
        made(client)
        process.terminate()
        assert process.wait(STARTS_WITHIN) == -signal.SIGTERM, "and not its parent alone"
        with pytest.raises(httpx.TransportError):
            client.get("/alive")


def test_store_of_an_earlier_release_is_refused_until_migrated(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'hanzo-ml.db'}"
    database = Database(url)
    assert read_revision(database) is Revision.NONE
    database.migrate()
    assert read_revision(database) is Revision.CURRENT
    put_back(url)
    assert read_revision(database) is Revision.EARLIER
    given = surroundings(tmp_path, free_port())
    refused = subprocess.run([*HANZO_ML, "server", "run"], env=given, capture_output=True, text=True, check=False)
    assert refused.returncode == EXIT_BAD_CONFIGURATION
    assert "`hanzo-ml server migrate`" in refused.stderr
    assert read_revision(database) is Revision.EARLIER
    subprocess.run([*HANZO_ML, "server", "migrate"], env=given, capture_output=True, check=True)
    with serving(tmp_path) as (client, _):
        made(client)


def test_new_database_appearing_after_server_start_is_initialized(tmp_path: Path) -> None:
    """As its container does where both start together: the server stayed not ready."""
    settings = Settings.load({"HANZO_ML_HOME": str(tmp_path / "home")})
    database = tmp_path / "home" / "hanzo-ml.db"
    with answering(settings) as client:
        database.parent.mkdir(exist_ok=True)
        database.unlink(missing_ok=True)
        database.mkdir()  # nothing can be opened there
        assert client.get("/ready").status_code == 503
        database.rmdir()
        assert client.get("/ready").json()["database"] is True
        made(client)
        for file in database.parent.glob("hanzo-ml.db*"):
            file.unlink()
        client.app.state.database.close()  # type: ignore[attr-defined]
        assert client.get("/ready").status_code == 503, "one that was lost is not a new one"


def test_database_of_a_later_release_counts_as_current(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'hanzo-ml.db'}")
    database.migrate()
    with database.write() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    assert read_revision(database) is Revision.CURRENT


@pytest.mark.slow
def test_concurrent_migrations_create_the_tables_once(postgres: PostgresServer, tmp_path: Path) -> None:
    name = f"test_{uuid4().hex[:12]}"
    postgres.execute(f"CREATE DATABASE {name}")
    given = surroundings(tmp_path, free_port(), HANZO_ML_DATABASE_URL=postgres.url(name))
    command = [*HANZO_ML, "server", "migrate"]
    processes = [subprocess.Popen(command, env=given, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    assert [(process.communicate()[1], process.returncode) for process in processes] == [("", 0)] * 2
    with serving(tmp_path, HANZO_ML_DATABASE_URL=postgres.url(name)) as (client, _):
        made(client)
