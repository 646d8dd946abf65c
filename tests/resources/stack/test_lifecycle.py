"""Refusals of `hanzo-ml up`: one line, before anything is started."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import pytest
from rich.console import Console

from recipes.contracts.job import EXIT_BAD_CONFIGURATION, BadConfiguration
from resources.installation import SOURCE
from resources.settings.settings import Settings
from resources.stack.detached_process import LOG_FILE, is_running, lock_folder, read_pid, stop_process
from resources.stack.lifecycle import down, is_ready, launch_service, service_folder
from resources.stack.services import Service, proxy_exemptions, python_path
from tests.support.free_ports import free_port
from tests.support.recipes.http_responses import answering
from tests.support.server_process import REPOSITORY

VARIABLES = (
    "HANZO_ML_SERVER_PORT",
    "HANZO_ML_ENGINE_PORT",
    "HANZO_ML_DAGSTER_PORT",
    "HANZO_ML_DAGSTER_CODE_SERVER_PORT",
)


def up(home: Path, ports: dict[str, int], **more: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HANZO_ML_")}
    variables = {name: str(port) for name, port in ports.items()}
    return subprocess.run(
        [sys.executable, "-m", "resources.stack.lifecycle", "up"],
        cwd=REPOSITORY,
        env={**clean, **variables, **more, "HANZO_ML_HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("variable", VARIABLES)
def test_a_port_in_use_is_named_with_the_setting_that_moves_it(variable: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = {name: free_port() for name in VARIABLES} | {variable: taken.getsockname()[1]}
        done = up(home, ports)
    assert done.returncode == EXIT_BAD_CONFIGURATION
    assert done.stderr.count("\n") == 1
    assert f"port {ports[variable]} for" in done.stderr
    assert variable in done.stderr
    assert not home.exists()


def test_an_unknown_setting_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    done = up(tmp_path / "home", {"HANZO_ML_SERVER_PROT": 1})
    assert done.returncode == EXIT_BAD_CONFIGURATION
    assert "HANZO_ML_SERVER_PROT" in done.stderr
    assert not (tmp_path / "home").exists()


def test_unreachable_database_is_reported_in_one_line(tmp_path: Path) -> None:
    """Regression: `up` printed a traceback of a hundred lines for a missing database."""
    ports = {name: free_port() for name in VARIABLES}
    address = f"postgresql://ann:secret@127.0.0.1:{free_port()}/none"
    done = up(tmp_path / "home", ports, HANZO_ML_DATABASE_URL=address)
    assert (done.returncode, done.stderr.count("\n")) == (EXIT_BAD_CONFIGURATION, 1), done.stderr
    assert "the metadata database was not changed: " in done.stderr and "secret" not in done.stderr


TELLS = "import signal; print([repr(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)])"


@pytest.mark.parametrize("in_background", [False, True])
def test_service_handles_signals_even_when_started_from_a_background_shell(in_background: bool, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if in_background else signal.default_int_handler)
    try:
        launch_service(Service("tells", (sys.executable, "-c", TELLS)), tmp_path / "tells", {})
        assert (signal.getsignal(signal.SIGINT) == signal.SIG_IGN) is in_background
    finally:
        signal.signal(signal.SIGINT, before)
    end = time.monotonic() + 30
    while is_running(tmp_path / "tells"):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert "SIG_IGN" not in (tmp_path / "tells" / LOG_FILE).read_text()


def test_health_check_bypasses_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with HTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as there:
        threading.Thread(target=there.handle_request, daemon=True).start()
        assert is_ready(Service("there", (), health=f"http://127.0.0.1:{there.server_port}/"))


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({}, "127.0.0.1,localhost"),
        ({"no_proxy": "git.corp,localhost"}, "git.corp,localhost,127.0.0.1"),
        ({"NO_PROXY": ".corp"}, ".corp,127.0.0.1,localhost"),
    ],
)
def test_proxy_exemptions_keep_given_hosts_and_add_those_of_the_stack(given: dict[str, str], names: str) -> None:
    assert proxy_exemptions(given) == {"no_proxy": names, "NO_PROXY": names}


def test_python_path_of_the_caller_is_passed_to_the_stack() -> None:
    """Regression: the server did not find a user's objective, nor a user's script its modules."""
    assert python_path({}) == str(SOURCE)
    assert python_path({"PYTHONPATH": "/his/own:/other"}) == f"{SOURCE}:/his/own:/other"


@pytest.mark.parametrize("command", [("stack.lifecycle", "up"), ("metadata.migrate",), ("stack.reset", "--yes")])
def test_a_state_folder_that_cannot_be_made_is_named_in_one_line(command: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = program(tmp_path / "file" / "home", *command)
    assert done.returncode == EXIT_BAD_CONFIGURATION
    assert done.stderr.count("\n") == 1 and str(tmp_path / "file") in done.stderr and "set HANZO_ML_HOME" in done.stderr


STARTS_A_WORKER_AS_IT_ENDS = """
import os, signal, sys
from pathlib import Path
from resources.stack.detached_process import lock_folder, start_detached

def end(number, frame):
    work = Path(sys.argv[1])
    work.mkdir(parents=True)
    with lock_folder(work) as descriptor:
        start_detached(["sleep", "600"], work, descriptor, cwd=None, env={})
    os._exit(0)

signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
signal.pause()
"""


def test_down_leaves_no_run_worker_that_the_daemon_starts_as_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: it continued to run its job after the stack was down."""
    settings = Settings(home=tmp_path)
    worker = settings.run_workers / "late"
    daemon = Service("dagster-daemon", (sys.executable, "-c", STARTS_A_WORKER_AS_IT_ENDS, str(worker)))
    monkeypatch.setattr("resources.stack.lifecycle.list_services", lambda settings: [daemon])
    place = service_folder(settings, daemon.name)
    launch_service(daemon, place, {})
    while "ready" not in (place / LOG_FILE).read_text():
        assert is_running(place)
        time.sleep(0.01)
    try:
        down(settings, Console())
        assert worker.is_dir() and not is_running(worker)
    finally:
        stop_process(worker, 0)


OUT_OF_REACH = """
import os, sys, time
if os.fork():
    os._exit(0)
os.setsid()
print(os.getpid(), flush=True)
time.sleep(600)
"""


def test_down_ends_and_names_a_run_worker_that_cannot_be_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: it waited forever for a worker blocked in the kernel.

    Here a process that no signal to the worker reaches holds its lock.
    """
    settings = Settings(home=tmp_path)
    worker = settings.run_workers / "stuck"
    worker.mkdir(parents=True)
    monkeypatch.setattr("resources.stack.lifecycle.list_services", lambda settings: [])
    monkeypatch.setattr("resources.stack.lifecycle.KILL_SECONDS", 0.1)
    launch_service(Service("stuck", (sys.executable, "-c", OUT_OF_REACH)), worker, {})
    while not (said := (worker / LOG_FILE).read_text()).endswith("\n"):
        assert is_running(worker)
        time.sleep(0.01)
    try:
        with pytest.raises(
            BadConfiguration, match=rf"^run worker stuck \(process {read_pid(worker)}\): not ended by SIGKILL"
        ):
            down(settings, Console())
    finally:
        os.kill(int(said), signal.SIGKILL)
    while is_running(worker):
        time.sleep(0.01)
    down(settings, Console())


def test_down_waits_for_the_up_that_works_on_the_same_folder(tmp_path: Path) -> None:
    """Regression: services that `up` started next kept running, and `up` failed as others were stopped."""
    command, env = (
        [sys.executable, "-m", "resources.stack.lifecycle", "down"],
        {**os.environ, "HANZO_ML_HOME": str(tmp_path)},
    )
    with lock_folder(tmp_path):
        waiting = subprocess.Popen(command, cwd=REPOSITORY, env=env, stdout=subprocess.PIPE, text=True)
        assert waiting.stdout is not None and "another `up` or `down`" in waiting.stdout.readline()
        assert waiting.poll() is None
    waiting.communicate()
    assert waiting.returncode == 0


@pytest.mark.parametrize("command", ["status", "down"])
def test_command_on_an_impossible_state_folder_finds_no_running_service(command: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = program(tmp_path / "file", "stack.lifecycle", command)
    assert (done.returncode, done.stderr) == (0, "")


def test_refusal_by_the_object_store_is_reported_with_the_setting(tmp_path: Path) -> None:
    """Regression: all services ran, but every job failed."""
    (tmp_path / "services").mkdir()
    keys = {"HANZO_ML_STORAGE_ACCESS_KEY": "wrong", "HANZO_ML_STORAGE_SECRET_KEY": "wrong"}
    with answering(403, "InvalidAccessKeyId", "No such key.") as url:
        done = program(tmp_path, "stack.lifecycle", "status", HANZO_ML_STORAGE_ENDPOINT=url, **keys)
    words = "refuses what the keys are used for, with 403 Forbidden: InvalidAccessKeyId: No such key. (settings storage."
    assert f"  object store       {url} {words}" in done.stdout


def program(home: Path, name: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HANZO_ML_")}
    ports = {name: str(free_port()) for name in VARIABLES}
    return subprocess.run(
        [sys.executable, "-m", f"resources.{name}", *arguments],
        cwd=REPOSITORY,
        env={**clean, **ports, **more, "HANZO_ML_HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )
