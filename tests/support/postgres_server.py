"""Real PostgreSQL server for the test session, with a fresh database per test.

Debian's binaries are found or, as root, installed. Tests that need the server are skipped, with the reason, only if
neither is possible. Tests of both database kinds get copies of a database that was migrated once.
"""

import atexit
import functools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest

from resources.metadata.database import Database
from tests.support.migrated_database import migrated
from tests.support.system_packages import found_or_installed

VERSIONS = Path("/usr/lib/postgresql")
TEMPLATE = "migrated"
STARTS_WITHIN = 60.0
WAITS_WITHIN = 30.0


class NoPostgres(Exception):
    """Reason why no PostgreSQL is available."""


class PostgresServer:
    """Run a server in a temporary folder, on a socket there.

    Without `fsync` it survives everything but a power failure.
    """

    def __init__(self, *, fsync: bool = False) -> None:
        self._fsync = "on" if fsync else "off"
        self._binaries = binaries()
        self._user = unprivileged_user()
        self.folder = Path(tempfile.mkdtemp(prefix="hanzo-ml-postgres-"))
        if self._user is not None:
            shutil.chown(self.folder, self._user)
        self._run("initdb", "-D", str(self._data), "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def url(self, name: str) -> str:
        return f"postgresql://postgres@/{name}?host={self.folder}"

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._binaries / "postgres", "-D", self._data, "-k", self.folder, "-h", "", "-c", f"fsync={self._fsync}"],
                stdout=log,
                stderr=log,
                user=self._user,
                cwd=self.folder,
            )
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Wait until it accepts connections, after a start or while it recovers from a crash."""
        assert self._process is not None
        deadline = time.monotonic() + STARTS_WITHIN
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"PostgreSQL did not start:\n{(self.folder / 'log').read_text()}")
            time.sleep(0.02)

    def kill(self) -> None:
        """Send SIGKILL to the postmaster and all its children, like a lost machine."""
        assert self._process is not None
        # Stop it first: a child forked meanwhile would hold the shared memory that the next server needs.
        self._process.send_signal(signal.SIGSTOP)
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        for pid in (self._process.pid, *map(int, children)):
            os.kill(pid, signal.SIGKILL)
        self._process.wait()
        while any(is_running(int(pid)) for pid in children):
            time.sleep(0.01)

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def create(self) -> str:
        """Create a database with all tables and return its name."""
        name = f"test_{uuid4().hex[:12]}"
        self.execute(f"CREATE DATABASE {name} TEMPLATE {self._template()}")
        return name

    def drop(self, name: str) -> None:
        self.execute(f"DROP DATABASE {name} WITH (FORCE)")

    def execute(self, statement: str) -> None:
        with psycopg.connect(self._conninfo, autocommit=True) as connection:
            connection.execute(statement.encode())

    @functools.cached_property
    def _conninfo(self) -> str:
        return f"host={self.folder} user=postgres dbname=postgres"

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    @functools.cache  # noqa: B019  (one server for the session)
    def _template(self) -> str:
        self.execute(f"CREATE DATABASE {TEMPLATE}")
        database = Database(self.url(TEMPLATE))
        database.migrate()
        database.close()
        return TEMPLATE

    def _run(self, binary: str, *arguments: str) -> None:
        command = [str(self._binaries / binary), *arguments]
        subprocess.run(command, user=self._user, cwd=self.folder, check=True, capture_output=True)

    def _answers(self) -> bool:
        try:
            psycopg.connect(self._conninfo).close()
        except psycopg.OperationalError:
            return False
        return True


def is_running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def unprivileged_user() -> str | None:
    """Return the user that runs PostgreSQL, which refuses root; None for the current user."""
    if os.getuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


def binaries() -> Path:
    """Return the folder of the newest installed server; install one if possible."""
    found = found_or_installed(installed, "postgresql")
    if found is None:
        raise NoPostgres(
            "no PostgreSQL: install Debian's package 'postgresql', or run the tests as root to have it installed"
        )
    return found


def installed() -> Path | None:
    folders = [path.parent for path in VERSIONS.glob("*/bin/postgres")]
    return max(folders, key=lambda folder: float(folder.parent.name), default=None)


def until_one_waits(url: str) -> None:
    """Wait until a connection to a database waits for a lock."""
    waiting = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with psycopg.connect(url, autocommit=True) as connection:
        deadline = time.monotonic() + WAITS_WITHIN
        while connection.execute(waiting).fetchone() is None:
            if time.monotonic() > deadline:
                raise AssertionError("nobody waits for a lock")
            time.sleep(0.01)


@functools.cache
def shared_server() -> PostgresServer:
    server = PostgresServer()
    atexit.register(server.stop)
    return server


@pytest.fixture(scope="session")
def postgres() -> PostgresServer:
    try:
        return shared_server()
    except NoPostgres as problem:
        pytest.skip(str(problem))


@pytest.fixture(scope="session")
def migrated_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a migrated file to copy."""
    path = tmp_path_factory.mktemp("migrated") / "metadata.db"
    path.write_bytes(migrated())
    return path


@pytest.fixture
def sqlite_url(migrated_sqlite: Path, tmp_path: Path) -> str:
    return f"sqlite:///{shutil.copy(migrated_sqlite, tmp_path / 'test.db')}"


@pytest.fixture
def postgres_url(postgres: PostgresServer) -> Iterator[str]:
    name = postgres.create()
    yield postgres.url(name)
    postgres.drop(name)
