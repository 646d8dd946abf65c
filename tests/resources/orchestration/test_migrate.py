"""Databases of an installation, migrated by all of its pods at once."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from sqlalchemy import text

from resources.metadata.database import Database
from resources.metadata.migrate import Revision, read_revision
from resources.orchestration import migrate
from resources.orchestration.instance import is_later
from resources.orchestration.postgres_schema import locked_schema
from resources.settings.settings import Settings
from tests.support.postgres_server import postgres, postgres_url

__all__ = ["postgres", "postgres_url"]
LATER = "9999"
"""A revision of a future release."""


def make_environment(folder: Path, url: str) -> dict[str, str]:
    folder.mkdir()
    document = {
        "storage": {"endpoint": "http://127.0.0.1:9", "access_key": "key", "secret_key": "secret"},
        "scheduler": {"backend": "kubernetes"},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(document))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HANZO_ML_")}
    return kept | {
        "HANZO_ML_HOME": str(folder),
        "HANZO_ML_CONFIG": str(folder / "config.yaml"),
        "HANZO_ML_DATABASE_URL": url,
        "KUBERNETES_SERVICE_HOST": "127.0.0.1",
        "KUBERNETES_SERVICE_PORT": "9",
    }


@pytest.mark.slow
def test_pods_that_start_at_once_leave_one_whole_database(postgres_url: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", migrate.__name__]
    pods = [
        subprocess.Popen(command, env=make_environment(tmp_path / name, postgres_url), stderr=subprocess.PIPE, text=True)
        for name in ("first", "second", "third")
    ]
    for pod in pods:
        _, said = pod.communicate(timeout=300)
        assert pod.returncode == 0, said
    settings = Settings.load(make_environment(tmp_path / "look", postgres_url))
    assert read_revision(Database(postgres_url)) is Revision.CURRENT
    with locked_schema(settings) as schema:
        assert schema.read()["dagster"]
    rendered = {(tmp_path / name / "dagster" / "dagster.yaml").read_text() for name in ("first", "second", "third")}
    assert len(rendered) == 1 and "KubernetesRunLauncher" in rendered.pop()


def test_database_of_a_later_release_is_left_as_it_is(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod of the previous release may restart during a rollout."""
    monkeypatch.setattr(migrate, "migrate_dagster", lambda settings, console: None)
    settings = Settings.load(make_environment(tmp_path / "pod", postgres_url))
    migrate.migrate(settings, Console())
    database = Database(postgres_url)
    with database.write() as connection:
        connection.execute(text(f"UPDATE alembic_version SET version_num = '{LATER}'"))
    migrate.migrate(settings, Console())
    with database.read() as connection:
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one() == LATER
    database.close()


def test_later_release_of_dagster_is_recognized() -> None:
    assert is_later("1.13.10", "1.13.9") and not is_later("1.13.9", "1.13.10") and not is_later(None, "1.13.9")


def test_database_that_starts_later_is_waited_for(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(migrate, "RETRY_SECONDS", 0.05)
    database = Database("postgresql://nobody@127.0.0.1:9/none", 2)

    def start() -> None:
        time.sleep(0.3)
        database.engine = Database(postgres_url).engine

    threading.Thread(target=start).start()
    migrate.wait_for_database(database, Console())
    assert "waiting for the database" in capsys.readouterr().out
