"""Start our server, `mlflow server` and FastTrackML, each in a separate environment and database."""

import os
import socket
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.tracking.load_generator import Client
from benchmarks.tracking.process_cost import list_session_processes, memory, processor_seconds
from resources.metadata.database import Database

NOT_PASSED_ON = ("HANZO_ML_", "MLFLOW_", "PYTHONDONTWRITEBYTECODE")
"""Variable names or prefixes. The last would compile our checkout at each start; peers are compiled by pip."""
REPOSITORY = Path(__file__).parents[2]
STARTS_WITHIN = 120.0
IDLE, IDLE_FOR = 0.2, 2.0
"""A server is idle if it uses less than this share of a processor for this many seconds."""

DURABILITY = {
    "sqlite": "ours: WAL, synchronous=NORMAL; mlflow: its default (rollback journal, FULL); FastTrackML: its default (WAL)",
    "postgresql": "one server for all, fsync and synchronous_commit on",
}


@dataclass(frozen=True)
class Place:
    """An empty folder, a free port and an empty database for a server."""

    folder: Path
    port: int
    database: str


@dataclass(frozen=True)
class Kind:
    packages: tuple[str, ...]
    command: Callable[[Path, Place], list[str]]
    environment: Callable[[Place], Mapping[str, str]] = lambda _: {}
    before: Callable[[Place], None] = lambda _: None
    databases: tuple[str, ...] = tuple(DURABILITY)


def ours(_: Path, place: Place) -> list[str]:
    return [sys.executable, "-m", "api.server"]


def our_environment(place: Place) -> dict[str, str]:
    return {
        "HANZO_ML_HOME": str(place.folder),
        "HANZO_ML_SERVER_PORT": str(place.port),
        "HANZO_ML_DATABASE_URL": place.database,
        "HANZO_ML_METRICS_ENABLED": "false",
        "HANZO_ML_LOGGING_LEVEL": "warning",
    }


def our_workers_environment(place: Place) -> dict[str, str]:
    """Return the deployed configuration: one worker per core (refused on SQLite, which has one writer)."""
    return {**our_environment(place), "HANZO_ML_SERVER_WORKERS": str(os.cpu_count())}


def migrate(place: Place) -> None:
    database = Database(place.database)
    database.migrate()
    database.close()


def mlflow(*options: str) -> Callable[[Path, Place], list[str]]:
    def command(binaries: Path, place: Place) -> list[str]:
        store = ["--backend-store-uri", place.database, "--artifacts-destination", str(place.folder / "artifacts")]
        return [str(binaries / "mlflow"), "server", *store, "--host", "127.0.0.1", "--port", str(place.port), *options]

    return command


def fasttrackml(binaries: Path, place: Place) -> list[str]:
    url = place.database.replace("sqlite:///", "sqlite://").replace("postgresql://", "postgres://")
    return [str(binaries / "fml"), "server", "--listen-address", f"127.0.0.1:{place.port}", "--database-uri", url]


def bare(_: Path, place: Place) -> list[str]:
    options = ["--host", "127.0.0.1", "--port", str(place.port), "--log-level", "warning"]
    return [sys.executable, "-m", "uvicorn", "benchmarks.tracking.lower_bounds:bare", *options]


MLFLOW = ("mlflow==3.17.2", "psycopg[binary]")
KINDS = {
    "ours": Kind((), ours, our_environment, migrate),
    "ours-workers": Kind((), ours, our_workers_environment, migrate, ("postgresql",)),
    "mlflow": Kind(MLFLOW, mlflow()),
    "mlflow-1-worker": Kind(MLFLOW, mlflow("--workers", "1")),
    "fasttrackml": Kind(("fasttrackml",), fasttrackml),
    "bare": Kind((), bare),
}


class Server:
    """A running server; `ready_after` is its start-up time in seconds."""

    def __init__(self, name: str, place: Place, cache: Path) -> None:
        kind = KINDS[name]
        self.port = place.port
        binaries = installed(kind.packages, cache) if kind.packages else Path()
        kind.before(place)
        self._log = place.folder / "server.log"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(NOT_PASSED_ON)}
        began = time.perf_counter()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                kind.command(binaries, place),
                cwd=REPOSITORY,
                env={**kept, **kind.environment(place)},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        while not self._answers():
            if self._process.poll() is not None or time.perf_counter() - began > STARTS_WITHIN:
                raise RuntimeError(f"{name} did not start:\n{self._log.read_text()[-2000:]}")
            time.sleep(0.02)
        self.ready_after = time.perf_counter() - began

    def memory(self) -> float:
        """Return the proportional set size of the server and all its children in MB."""
        return memory(list_session_processes(self._process.pid))

    def processor_seconds(self) -> float:
        return processor_seconds(list_session_processes(self._process.pid))

    def settle(self) -> None:
        """Wait until all of the server's processes have started.

        mlflow is healthy long before its job consumers have started, and meanwhile reached a tenth of its later throughput.
        """
        until = time.perf_counter() + STARTS_WITHIN
        used = self.processor_seconds()
        while time.perf_counter() < until:
            time.sleep(IDLE_FOR)
            before, used = used, self.processor_seconds()
            if used - before < IDLE * IDLE_FOR:
                return

    def stop(self) -> None:
        os.killpg(self._process.pid, 15)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            self._process.wait()

    def _answers(self) -> bool:
        try:
            client = Client(self.port)
            client.call(("GET", "/health", b""))
            client.close()
        except (OSError, RuntimeError):
            return False
        return True


def installed(packages: tuple[str, ...], cache: Path) -> Path:
    """Return the `bin` folder of an environment with these packages, created on first use."""
    folder = cache / packages[0].replace("==", "-")
    if not (folder / "complete").exists():
        print(f"installing {' '.join(packages)} into {folder}", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([folder / "bin" / "python", "-m", "pip", "install", "--quiet", *packages], check=True)
        (folder / "complete").touch()
    return folder / "bin"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
