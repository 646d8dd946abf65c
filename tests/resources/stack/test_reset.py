"""`hanzo-ml server reset`: all or nothing, and the store is like new afterwards."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.storage.artifact_store import Store
from resources.metadata.database import Database
from resources.metadata.jobs import Jobs
from resources.metadata.outbox import emit, read_after
from resources.metadata.tracking.tracking import Tracking
from resources.settings.settings import Settings
from resources.stack.detached_process import lock_folder

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    settings = Settings.load({"HANZO_ML_HOME": str(tmp_path)})
    Database(settings.database_url).migrate()
    return settings


def reset(settings: Settings, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HANZO_ML_")}
    return subprocess.run(
        [sys.executable, "-c", "from hanzo_ml.cli import main; main()", "server", "reset", *arguments],
        env={**clean, "HANZO_ML_HOME": str(settings.home), **variables},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def fill(settings: Settings, job_status: str) -> int:
    """Create a run, an object and a job; return the last event's number."""
    database = Database(settings.database_url)
    tracking = Tracking(database)
    run = tracking.runs.create(tracking.experiments.ensure("e", "default").id)
    tracking.run_data.log_param(run.id, "lr", "1")
    Jobs(database).submit(name="m", config={}, user="u", organization="default", id="j", status=job_status)
    Store(settings.store).put_bytes(f"s3://hanzo-ml/runs/{run.id}/artifacts/a.txt", b"a")
    with database.write() as connection:
        return emit(connection, "jobs", "t", "k", {})


@pytest.mark.slow
def test_reset_keeps_the_configuration_and_foreign_files(settings: Settings) -> None:
    (settings.home / "config.yaml").write_text("alerts: {stalled_after: 20m}\n")
    (settings.home / "notes.txt").write_text("mine")
    fill(settings, "queued")
    done = reset(settings, "--yes")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in settings.home.iterdir()) == ["config.yaml", "notes.txt"]
    assert reset(settings, "--yes").returncode == 0, "an empty store can be emptied"


@pytest.mark.slow
def test_reset_of_a_running_stack_empties_the_store_and_continues_event_numbers(settings: Settings) -> None:
    last = fill(settings, "queued")
    service = settings.home / "services" / "api"
    service.mkdir(parents=True)
    with lock_folder(service) as descriptor:
        assert descriptor is not None
        done = reset(settings, "--yes")
    assert done.returncode == 0 and "`hanzo-ml down`, then reset again" in done.stdout, done.stderr
    database = Database(settings.database_url)
    assert Jobs(database).page("default") == ([], None)
    assert Store(settings.store).list("s3://hanzo-ml/runs") == []
    with database.write() as connection:
        assert emit(connection, "jobs", "t", "k", {}) > last
        assert len(read_after(connection, 0)) == 1
    assert Tracking(database).experiments.get(0).name == "Default"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "variables", "says"),
    [
        ((), {}, "confirm with --yes"),
        (("--yes",), {"HANZO_ML_AUTH_VERIFY_TOKENS": "true"}, "production mode"),
        (("--yes",), {}, "job j is running"),
    ],
)
def test_refused_reset_changes_nothing(
    settings: Settings, arguments: tuple[str, ...], variables: dict[str, str], says: str
) -> None:
    fill(settings, "running")
    refused = reset(settings, *arguments, **variables)
    assert refused.returncode == 78
    assert says in refused.stderr
    assert Jobs(Database(settings.database_url)).read("j").status == "running"
    assert len(Store(settings.store).list("s3://hanzo-ml/runs")) == 1
