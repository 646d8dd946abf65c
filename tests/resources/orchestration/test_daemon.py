"""Daemon restart after the clock was set back, and reset of future sensor ticks."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
import yaml
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.remote_origin import InProcessCodeLocationOrigin, RemoteInstigatorOrigin, RemoteRepositoryOrigin
from dagster._core.scheduler.instigation import (
    InstigatorState,
    InstigatorStatus,
    ScheduleInstigatorData,
    SensorInstigatorData,
)
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin
from dagster._daemon.sensor import get_elapsed
from sqlalchemy import text

from resources.metadata.database import Database
from resources.orchestration.daemon import reset_future_ticks
from resources.orchestration.instance import postgres_storage_config, sqlite_storage_config
from resources.orchestration.postgres_schema import dagster_database_url, locked_schema
from resources.orchestration.postgres_storage import create_tables
from resources.settings.settings import Settings
from tests.support.postgres_server import postgres, postgres_url

__all__ = ["postgres", "postgres_url"]

PROGRAM = """
import os, sys, threading
from resources.orchestration.daemon import restart_on_clock_rollback

over = threading.Event()
seen = iter({seen})

def clock():
    try:
        return next(seen)
    except StopIteration:
        over.set()
        return {seen}[-1]

print(os.getpid(), os.fstat({descriptor}).st_ino, flush=True)
if "BEGUN" not in os.environ:
    os.environ["BEGUN"] = "once"
    restart_on_clock_rollback(clock, lambda: 0.0, 0.001)
    over.wait()
    print("went on")
"""


@pytest.mark.parametrize(
    ("seen", "restarts"),
    [
        ([7200.0, 7200.0, 0.0], True),
        ([0.0, 7200.0, 7200.0], False),
        ([7200.0, 7195.0, 7190.0, 7185.0], False),
    ],
    ids=["put back", "put forward", "corrected"],
)
def test_daemon_restarts_itself_when_the_clock_was_set_back(tmp_path: Path, seen: list[float], restarts: bool) -> None:
    """It keeps its process id and the lock that it inherited."""
    with (tmp_path / "lock").open("w") as lock:
        program = PROGRAM.format(seen=seen, descriptor=lock.fileno())
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, pass_fds=[lock.fileno()], timeout=60
        )
    first, *others = done.stdout.splitlines()
    assert others == (["the clock was set back by 7200 s: restarting the daemon", first] if restarts else ["went on"])


def test_dagster_log_lines_are_printed_once_even_after_a_lost_connection() -> None:
    says = (
        "import logging; from resources.orchestration.daemon import install_root_handler; from dagster._utils.log "
        "import configure_loggers; "
        "from dagster_postgres.utils import retry_pg_connection_fn; from sqlalchemy.exc import TimeoutError as Lost\n"
        "install_root_handler(); configure_loggers(log_level='INFO'); tried = []\n"
        "def connect():\n    tried.append(1)\n    if len(tried) == 1: raise Lost('lost')\n"
        "retry_pg_connection_fn(connect); logging.getLogger('dagster.daemon').info('a look')"
    )
    done = subprocess.run([sys.executable, "-c", says], capture_output=True, text=True, check=True)
    assert (done.stderr + done.stdout).count("lost") == 1
    assert (done.stderr + done.stdout).count("a look") == 1


@pytest.fixture(params=["sqlite", "postgresql"])
def instance(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dg.DagsterInstance]:
    """Yield an instance with the storage that `up` configures, locally and on a cluster."""
    storage = sqlite_storage_config(tmp_path)
    if request.param == "postgresql":
        monkeypatch.setenv("HANZO_ML_DATABASE_URL", request.getfixturevalue("postgres_url"))
        with locked_schema(Settings.load()) as schema:
            storage = postgres_storage_config(schema.name)
        create_tables(dagster_database_url(Settings.load(), schema.name))
    configuration = {"telemetry": {"enabled": False}, "storage": {"custom": storage}}
    (tmp_path / "dagster.yaml").write_text(yaml.safe_dump(configuration))
    with dg.DagsterInstance.from_config(str(tmp_path)) as made:
        yield made


@pytest.mark.parametrize("field", ["last_tick_timestamp", "last_tick_start_timestamp"])
def test_sensor_with_a_tick_in_the_future_is_due_after_a_reset(instance: dg.DagsterInstance, field: str) -> None:
    """A sensor waits for its interval since the last tick.

    With a tick two hours ahead, all sensors waited for two hours.
    """
    now = time.time()
    waits, has_looked = sensor("waits", {field: now + 7200}), sensor("has_looked", {field: now - 7200})
    data = ScheduleInstigatorData(cron_schedule="0 * * * *", start_timestamp=now + 7200)
    schedule = InstigatorState(origin("schedule"), InstigatorType.SCHEDULE, InstigatorStatus.RUNNING, data)
    for state in (waits, has_looked, schedule):
        instance.add_instigator_state(state)
    assert get_elapsed(found(instance, waits)) < 0

    reset_future_ticks(instance, now)

    assert get_elapsed(found(instance, waits)) is None, "it never looked: it is due at once"
    assert found(instance, waits).instigator_data.cursor == "7"
    assert (found(instance, has_looked), found(instance, schedule)) == (has_looked, schedule)


def sensor(name: str, looks: dict[str, float]) -> InstigatorState:
    data = SensorInstigatorData(cursor="7", **looks)
    return InstigatorState(origin(name), InstigatorType.SENSOR, InstigatorStatus.RUNNING, data)


def origin(name: str) -> RemoteInstigatorOrigin:
    location = InProcessCodeLocationOrigin(LoadableTargetOrigin(module_name="looks"))
    return RemoteInstigatorOrigin(RemoteRepositoryOrigin(location, "looks"), name)


def found(instance: dg.DagsterInstance, state: InstigatorState) -> InstigatorState:
    known = instance.get_instigator_state(state.origin.get_id(), state.origin.get_selector().get_id())
    assert known is not None
    return known


LEADER = """
import sys, threading, time
from resources.orchestration import daemon
from resources.settings.settings import Settings

daemon.CHECK_INTERVAL_SECONDS = 0.1
with daemon.lead_daemons(Settings.load()):
    print("leads", flush=True)
    time.sleep(300)
"""


def start_daemon(folder: Path, url: str) -> "subprocess.Popen[str]":
    environment = {**os.environ, "HANZO_ML_HOME": str(folder), "HANZO_ML_DATABASE_URL": url}
    folder.mkdir()
    return subprocess.Popen([sys.executable, "-c", LEADER], env=environment, stdout=subprocess.PIPE, text=True)


def read_line(daemon: "subprocess.Popen[str]") -> str:
    assert daemon.stdout is not None
    return daemon.stdout.readline().strip()


@pytest.mark.requirement("Z4")
def test_second_daemon_waits_and_is_alive_until_the_first_has_ended(postgres_url: str, tmp_path: Path) -> None:
    first = start_daemon(tmp_path / "first", postgres_url)
    try:
        assert read_line(first) == "leads"
        with start_daemon(tmp_path / "second", postgres_url) as second:
            try:
                alive = tmp_path / "second" / "dagster-daemon.alive"
                deadline = time.monotonic() + 60
                while not alive.exists():
                    assert time.monotonic() < deadline and second.poll() is None
                    time.sleep(0.05)
                first.terminate()
                assert first.wait(30) == 0
                assert read_line(second) == "leads"
            finally:
                second.kill()
    finally:
        first.kill()
        first.wait()


def test_daemon_whose_session_was_ended_starts_again(postgres_url: str, tmp_path: Path) -> None:
    with start_daemon(tmp_path / "only", postgres_url) as daemon:
        try:
            assert read_line(daemon) == "leads"
            database = Database(postgres_url)
            with database.write() as connection:
                connection.execute(
                    text("SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND objid = 57000004")
                )
            database.close()
            assert "another daemon may lead" in read_line(daemon)
            assert read_line(daemon) == "leads"
        finally:
            daemon.kill()
